"""Iterated local search over stages, for problems that are too large for exact search."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.solver.sequences import in_order_within, total_seconds
from raymm.scheduler.multiplex.solver.stage_evaluation import ROUNDING, StageEvaluator

# Number of random changes in one kick out of a local optimum.
KICKS = (2, 3, 4)


def improve(
    evaluator: StageEvaluator, stages: Sequence[int], within: int, kicks: int, seed: int,
    better: Callable[[list[int]], None] | None = None, floor: float = 0.0,
    searches: int | None = None,
) -> list[int]:
    """Return faster stages of the modules ``within``, if any are found.

    A step moves a module to another or a separate stage, swaps two modules, or merges two stages.
    The steps that may save most according to bounds are tried first. If no step saves time, a few
    random steps are made and the descent restarts.

    Args:
        stages: initial sets of modules, in order.
        floor: stop when the seconds are this low.
        searches: no restarts after this many searches within stages.
    """
    rng = random.Random(seed)
    last = None if searches is None else evaluator.searches + searches
    best = _descend(evaluator, list(stages), within, better, None)
    best_seconds = total_seconds(evaluator, best)
    for _ in range(kicks):
        if best_seconds <= floor * (1 + ROUNDING) or within.bit_count() < 2:
            break
        if last is not None and evaluator.searches > last:
            break
        started = _kicked(evaluator.problem, best, within, rng)
        lowered = _descend(evaluator, started, within, better, best_seconds)
        seconds = total_seconds(evaluator, lowered)
        if seconds < best_seconds * (1 - ROUNDING):
            best, best_seconds = lowered, seconds
    return best


def _descend(
    evaluator: StageEvaluator, stages: list[int], within: int,
    better: Callable[[list[int]], None] | None, below: float | None,
) -> list[int]:
    """Take improving steps until there are none; call ``better`` with stages faster than
    ``below``."""
    if below is None and better is not None:
        better(stages)
    while True:
        better_stages = _best_step(evaluator, stages, within)
        if better_stages is None:
            return stages
        stages = better_stages
        if better is not None:
            seconds = total_seconds(evaluator, stages)
            if below is None or seconds < below:
                better(stages)
                below = seconds


def _best_step(evaluator: StageEvaluator, stages: list[int], within: int) -> list[int] | None:
    seconds = {stage: evaluator.result(stage).seconds for stage in stages}
    candidates = []
    for replaced, new in steps(evaluator.problem, stages):
        now = sum(seconds[stage] for stage in replaced)
        least = sum(evaluator.known_bound(stage) for stage in new)
        if least < now * (1 - ROUNDING):
            candidates.append((least - now, replaced, new))
    candidates.sort()
    for _, replaced, new in candidates:
        now = sum(seconds[stage] for stage in replaced)
        unchanged = [stage for stage in stages if stage not in replaced]
        ordered = in_order_within(evaluator.problem, [*unchanged, *new], within)
        if ordered and _below(evaluator, new, now * (1 - ROUNDING)):
            return ordered
    return None


def _below(evaluator: StageEvaluator, stages: Sequence[int], seconds: float) -> bool:
    """Return True if the stages take less than ``seconds`` in total. As most do not, cheap probes
    of the stages come first."""
    for solve in (False, True):
        least = [evaluator.known_bound(stage) for stage in stages]
        for i, stage in enumerate(stages):
            below = seconds - sum(least[:i]) - sum(least[i + 1 :])
            result = evaluator.result(stage) if solve else evaluator.probe(stage, below)
            if not result.seconds < below:
                return False
            least[i] = result.seconds if solve else result.bound
    return True


def steps(
    problem: MappingProblem, stages: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (old stages, new stages) of every step whose new stages have no dependent modules.
    The order of stages is not checked."""
    conflicts = {stage: 0 for stage in stages}
    for stage in stages:
        for m in bits(stage):
            conflicts[stage] |= problem.related[m]
    for stage in stages:
        for m in bits(stage):
            module = 1 << m
            remaining = stage ^ module
            if remaining:
                yield (stage,), (remaining, module)
            for second in stages:
                if second == stage:
                    continue
                if not conflicts[second] & module:
                    yield (stage, second), (
                        (remaining, second | module) if remaining else (second | module,)
                    )
                if second < stage:
                    continue
                for n in bits(second):
                    if problem.related[m] & second & ~(1 << n):
                        break
                    if not problem.related[n] & remaining:
                        yield (stage, second), (remaining | 1 << n, second ^ 1 << n | module)
    for i, stage in enumerate(stages):
        for second in stages[i + 1 :]:
            if not conflicts[stage] & second and stage.bit_count() > 1 < second.bit_count():
                yield (stage, second), (stage | second,)


def _kicked(
    problem: MappingProblem, stages: list[int], within: int, rng: random.Random
) -> list[int]:
    for _ in range(rng.choice(KICKS)):
        possible = list(steps(problem, stages))
        for replaced, new in rng.sample(possible, min(10, len(possible))):
            unchanged = [stage for stage in stages if stage not in replaced]
            ordered = in_order_within(problem, [*unchanged, *new], within)
            if ordered:
                stages = ordered
                break
    return stages
