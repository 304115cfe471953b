"""Small random mapping problems, and brute-force oracles."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import strategies as st

from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.multiplex.mapping import Placement, stage_seconds
from raymm.scheduler.multiplex.problem import MappingProblem, bits


def surface(rng: np.random.Generator, name: str, gpus: int, steps: int) -> ScalingSurface:
    """Return random samples that need not fall: the solver assumes nothing."""
    degrees = [1 << j for j in range(gpus.bit_length())]
    work = rng.uniform(0.2, 2.0)
    quotas = range(1, steps + 1)
    return ScalingSurface(
        name, tuple(degrees), tuple(quotas), steps,
        tuple(tuple(
            float(work / (d * q / steps) ** rng.uniform(0.5, 1.0) * rng.uniform(0.9, 1.1))
            for q in quotas
        ) for d in degrees),
        tuple(int(rng.integers(1, 6)) for _ in degrees),
        tuple(float(b) for b in np.sort(rng.uniform(0.05, 0.9, steps))),
    )


@st.composite
def problems(
    draw, most: int = 4, pools: tuple[int, ...] = (1, 2, 3, 4), steps: tuple[int, ...] = (2, 3),
    edges: bool = True, memory_over: str = "stage", limits: tuple[int | None, ...] = (None, 6, 9),
) -> MappingProblem:
    """Draw up to ``most`` modules with any interference, memory limits and dependencies."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count, gpus = draw(st.integers(1, most)), draw(st.sampled_from(pools))
    step = draw(st.sampled_from(steps))
    names = [f"m{i}" for i in range(count)]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    chosen = [pair for pair in pairs if edges and draw(st.booleans())]
    coefficients = (draw(st.sampled_from((-0.1, 0.0, 0.1))), draw(st.sampled_from((0.0, 0.3))),
                    draw(st.sampled_from((-0.2, 0.0, 0.8))))
    if draw(st.integers(0, 4)) == 0:
        coefficients = (0.3, -0.2, 0.2)
    law = Interference(
        *coefficients, draw(st.sampled_from(("relative", "seconds"))),
        draw(st.sampled_from(("product", "own"))),
    )
    return MappingProblem(
        tuple(surface(rng, name, gpus, step) for name in names), tuple(chosen), gpus, step,
        draw(st.sampled_from(limits)), law, memory_over,
    )


def brute_force_stage(problem: MappingProblem, stage: int) -> float:
    """Return the least seconds over all options and sets of GPUs; infinite if nothing fits."""
    modules = list(bits(stage))
    choices = []
    for m in modules:
        of_module = []
        for j, degree in enumerate(problem.degrees):
            for q in range(1, problem.steps + 1):
                if math.isfinite(problem.seconds[m, j, q]):
                    of_module += [
                        (j, Placement(problem.names[m], gpus, q))
                        for gpus in itertools.combinations(range(problem.gpus), degree)
                    ]
        choices.append(of_module)
    best = math.inf

    def place(i: int, made: list[Placement], quota: list[int], memory: list[int]) -> None:
        nonlocal best
        if i == len(modules):
            best = min(best, stage_seconds(problem, made))
            return
        for j, placement in choices[i]:
            quotas, bytes_ = list(quota), list(memory)
            for g in placement.gpus:
                quotas[g] += placement.quota
                bytes_[g] += int(problem.memory[modules[i], j])
            fits = problem.memory_bytes is None or max(bytes_) <= problem.memory_bytes
            if max(quotas) <= problem.steps and fits:
                place(i + 1, [*made, placement], quotas, bytes_)

    place(0, [], [0] * problem.gpus, [0] * problem.gpus)
    return best


def brute_force_mapping(problem: MappingProblem) -> float:
    """Return the least seconds over all sequences of stages, each tried in full."""
    known: dict[int, float] = {}
    everyone = (1 << len(problem.names)) - 1

    def rest(done: int) -> float:
        if done == everyone:
            return 0.0
        ready = [
            m for m in range(len(problem.names))
            if not done >> m & 1 and not problem.ancestors[m] & ~done
        ]
        best = math.inf
        for size in range(1, len(ready) + 1):
            for some in itertools.combinations(ready, size):
                stage = sum(1 << m for m in some)
                if stage not in known:
                    known[stage] = brute_force_stage(problem, stage)
                if math.isfinite(known[stage]):
                    best = min(best, known[stage] + rest(done | stage))
        return best

    return rest(0)


def brute_force_iteration(problem: MappingProblem) -> float:
    """Return the least seconds over all mappings that fit in memory over the whole iteration.

    Tries all sequences of stages and all sets of GPUs of every module; infinite if none fit.
    """
    modules = range(len(problem.names))
    choices = [[
        (int(problem.memory[m, j]), Placement(problem.names[m], gpus, q))
        for j, degree in enumerate(problem.degrees)
        for q in range(1, problem.steps + 1) if math.isfinite(problem.seconds[m, j, q])
        for gpus in itertools.combinations(range(problem.gpus), degree)
    ] for m in modules]
    sequences = list(_sequences(problem, 0))
    best = math.inf
    for chosen in itertools.product(*choices):
        used = [0] * problem.gpus
        for size, placement in chosen:
            for g in placement.gpus:
                used[g] += size
        if max(used) > problem.memory_bytes:
            continue
        known: dict[int, float] = {}
        for sequence in sequences:
            for stage in sequence:
                if stage not in known:
                    known[stage] = _seconds_if_legal(problem, [chosen[m][1] for m in bits(stage)])
            best = min(best, math.fsum(known[stage] for stage in sequence))
    return best


def _sequences(problem: MappingProblem, done: int):
    """Yield all legal sequences of further stages."""
    if done == (1 << len(problem.names)) - 1:
        yield ()
        return
    ready = [
        m for m in range(len(problem.names))
        if not done >> m & 1 and not problem.ancestors[m] & ~done
    ]
    for size in range(1, len(ready) + 1):
        for some in itertools.combinations(ready, size):
            stage = sum(1 << m for m in some)
            for rest in _sequences(problem, done | stage):
                yield (stage, *rest)


def _seconds_if_legal(problem: MappingProblem, placements: list[Placement]) -> float:
    quota = [0] * problem.gpus
    for placement in placements:
        for g in placement.gpus:
            quota[g] += placement.quota
    return stage_seconds(problem, placements) if max(quota) <= problem.steps else math.inf
