"""Mappings: the stage, GPUs and quota of each module."""

from __future__ import annotations

import math
from collections.abc import Mapping as ByName
from collections.abc import Sequence
from dataclasses import dataclass

from raymm.errors import PlanError
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.graph.strict_json import MOST_GPUS, MOST_STEPS, number, text, whole
from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.plan.stage_edges import SAMPLES
from raymm.scheduler.schedules.slots import Slots

# Accepted relative difference between the seconds in a file and the model's prediction.
SECONDS_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Placement:
    """One module in one stage.

    Attributes:
        gpus: GPUs of the module, ascending; a power of two of them.
        quota: steps of the multiprocessors of each of these GPUs.
        slices: part of the module's work that runs in this stage, in units of ``Mapping.slices``.
    """

    module: str
    gpus: tuple[int, ...]
    quota: int
    slices: int = 1


@dataclass(frozen=True)
class MultiplexStage:
    """Modules that run concurrently, and the seconds until the last ends."""

    placements: tuple[Placement, ...]
    seconds: float


@dataclass(frozen=True)
class Mapping:
    """Stages in the order in which they run; raises ``PlanError`` naming an invalid field.

    Attributes:
        bound: proven lower bound of the seconds of any mapping of whole modules; 0 if unknown.
        method: description of the method that made the mapping.
        slices: number of slices of every module's work; above 1 only for baselines.
    """

    gpus: int
    steps: int
    stages: tuple[MultiplexStage, ...]
    bound: float = 0.0
    method: str = "by hand"
    slices: int = 1

    def __post_init__(self) -> None:
        whole(self.gpus, "gpus", 1, MOST_GPUS)
        whole(self.steps, "steps", 1, MOST_STEPS)
        whole(self.slices, "slices", 1)
        number(self.bound, "bound", 0.0)
        text(self.method, "method")
        if not self.stages:
            raise PlanError("stages is empty; a mapping has at least one")
        for s, stage in enumerate(self.stages):
            number(stage.seconds, f"stages[{s}].seconds", 0.0)
            if not stage.placements:
                raise PlanError(f"stages[{s}].placements is empty; a stage has at least one")
            self._check_stage(s, stage)
        # Baselines that slice modules may be faster than all mappings of whole modules.
        most = self.seconds * (1 + SECONDS_TOLERANCE)
        if self.slices == 1 and 0 < self.seconds and self.bound > most:
            raise PlanError(
                f"bound is {self.bound}, above the {self.seconds} that stages[].seconds add up "
                "to; no mapping takes less than its bound"
            )

    def _check_stage(self, s: int, stage: MultiplexStage) -> None:
        used = [0] * self.gpus
        seen: set[str] = set()
        for p, placement in enumerate(stage.placements):
            field = f"stages[{s}].placements[{p}]"
            name = text(placement.module, f"{field}.module")
            if name in seen:
                raise PlanError(
                    f"{field}.module is {name!r} a second time; a stage has each module once"
                )
            seen.add(name)
            whole(placement.slices, f"{field}.slices", 1, self.slices)
            for g in placement.gpus:
                whole(g, f"{field}.gpus of {name!r}", 0, self.gpus - 1)
            degree = len(placement.gpus)
            if list(placement.gpus) != sorted(set(placement.gpus)) or not degree:
                raise PlanError(
                    f"{field}.gpus of {name!r} is {list(placement.gpus)}; it must have at least "
                    "one GPU, ascending"
                )
            if degree & (degree - 1):
                raise PlanError(
                    f"{field}.gpus of {name!r} has {degree} GPUs; accepted: a power of two"
                )
            if type(placement.quota) is not int or not 1 <= placement.quota <= self.steps:
                raise PlanError(
                    f"{field}.quota of {name!r} is {placement.quota!r}; it must be a whole number "
                    f"of steps from 1 (the granularity, 1/{self.steps} of a GPU) to {self.steps}"
                )
            for g in placement.gpus:
                used[g] += placement.quota
        for g, total in enumerate(used):
            if total > self.steps:
                raise PlanError(
                    f"stages[{s}].placements: quotas on GPU {g} add up to {total}; accepted: at "
                    f"most {self.steps} steps, the whole GPU"
                )

    @property
    def seconds(self) -> float:
        """Predicted seconds of one iteration, the sum over stages (eq. 1)."""
        return math.fsum(stage.seconds for stage in self.stages)

    @property
    def gap(self) -> float:
        """Largest fraction of the seconds that a better mapping could save; 0 if proven optimal."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0

    @property
    def optimal(self) -> bool:
        """True if no mapping is faster, up to rounding."""
        return self.gap <= SECONDS_TOLERANCE

    def check(self, problem: MappingProblem) -> None:
        """Check that this is a mapping of the problem, with the seconds that its model predicts.
        Raise ``PlanError`` for another pool of GPUs, an unknown or incomplete module, too little
        memory, a violated dependency, or other seconds."""
        for field in ("gpus", "steps"):
            if getattr(self, field) != getattr(problem, field):
                raise PlanError(
                    f"{field} is {getattr(self, field)}; the problem has {getattr(problem, field)}"
                )
        self._check_order(problem)
        for s, stage in enumerate(self.stages):
            self._check_memory(problem, s, stage)
            predicted = stage_seconds(problem, stage.placements, self.slices)
            if not math.isclose(predicted, stage.seconds, rel_tol=SECONDS_TOLERANCE):
                raise PlanError(
                    f"stages[{s}].seconds is {stage.seconds}; the model predicts {predicted}"
                )

    def _check_order(self, problem: MappingProblem) -> None:
        index = {name: m for m, name in enumerate(problem.names)}
        slices_left = dict.fromkeys(problem.names, self.slices)
        for s, stage in enumerate(self.stages):
            for p, placement in enumerate(stage.placements):
                field, name = f"stages[{s}].placements[{p}]", placement.module
                if name not in index:
                    raise PlanError(
                        f"{field}.module is {name!r}; modules are {list(problem.names)}"
                    )
                for ancestor in bits(problem.ancestors[index[name]]):
                    if slices_left[problem.names[ancestor]]:
                        raise PlanError(
                            f"{field}.module is {name!r}, which depends on "
                            f"{problem.names[ancestor]!r}; that must be complete in an earlier "
                            "stage"
                        )
            for p, placement in enumerate(stage.placements):
                slices_left[placement.module] -= placement.slices
                if slices_left[placement.module] < 0:
                    raise PlanError(
                        f"stages[{s}].placements[{p}].module is {placement.module!r}, which is "
                        f"already complete; a module runs once ({self.slices} slices in all)"
                    )
        if missing := [name for name, count in slices_left.items() if count]:
            raise PlanError(f"stages do not complete {missing}; every module must run")

    def _check_memory(self, problem: MappingProblem, s: int, stage: MultiplexStage) -> None:
        if problem.memory_bytes is None:
            return
        used = [0] * self.gpus
        for placement in stage.placements:
            m = problem.names.index(placement.module)
            needed = int(problem.memory[m, len(placement.gpus).bit_length() - 1])
            for g in placement.gpus:
                used[g] += needed
        for g, total in enumerate(used):
            if total > problem.memory_bytes:
                raise PlanError(
                    f"stages[{s}] needs {total} bytes on GPU {g}; accepted: at most memory_bytes, "
                    f"{problem.memory_bytes}"
                )


def module_seconds(
    problem: MappingProblem, placements: Sequence[Placement], slices: int = 1
) -> list[float]:
    """Return the predicted seconds of each placement, next to the others (eq. 7). ``slices`` is the
    number of slices of every module's work."""
    indices = [problem.names.index(placement.module) for placement in placements]
    use = [
        float(problem.bandwidth[m, p.quota]) for m, p in zip(indices, placements, strict=True)
    ]
    on_gpu: dict[int, list[int]] = {}
    # The fixed order makes sums independent of the order of the placements.
    for i in sorted(range(len(placements)), key=lambda i: indices[i]):
        for g in placements[i].gpus:
            on_gpu.setdefault(g, []).append(i)
    contents = [{tuple(on_gpu[g]) for g in placement.gpus} for placement in placements]
    result = []
    for i, placement in enumerate(placements):
        degree = len(placement.gpus).bit_length() - 1
        alone = float(problem.seconds[indices[i], degree, placement.quota])
        on_gpus = [[use[i], *(use[o] for o in gpu if o != i)] for gpu in contents[i]]
        seconds = problem.interference.colocated(alone, on_gpus)
        result.append(seconds * placement.slices / slices)
    return result


def stage_seconds(
    problem: MappingProblem, placements: Sequence[Placement], slices: int = 1
) -> float:
    """Return the predicted seconds of a stage: those of its slowest module (eq. 4)."""
    return max(module_seconds(problem, placements, slices))


def predicted_stage(
    problem: MappingProblem, placements: Sequence[Placement], slices: int = 1
) -> MultiplexStage:
    return MultiplexStage(tuple(placements), stage_seconds(problem, placements, slices))


def mapped_plan(graph: ModuleGraph, mapping: Mapping, num_microbatches: int = 1) -> Plan:
    """Return the plan that runs a mapping, with ``num_microbatches`` per step, one after another.

    Its ranks are the GPUs that the mapping uses, in their order. Losses without a placement run
    after the last stage, on the GPUs of the last module that they read.

    Raises:
        PlanError: sliced modules (slices are for comparisons of mappings only); a module is
            unknown, placed twice or missing, or runs no later than a module that it reads.
    """
    if mapping.slices > 1:
        raise PlanError(
            f"slices is {mapping.slices}; only mappings with slices = 1 (whole modules) can run"
        )
    names = graph.topological
    ranks = {
        gpu: rank for rank, gpu in enumerate(sorted(
            {gpu for stage in mapping.stages for p in stage.placements for gpu in p.gpus}
        ))
    }
    placed: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for s, stage in enumerate(mapping.stages):
        for p, placement in enumerate(stage.placements):
            field = f"stages[{s}].placements[{p}].module is {placement.module!r}"
            if placement.module not in names:
                raise PlanError(f"{field}; accepted: {', '.join(sorted(names))}")
            if placement.module in placed:
                raise PlanError(f"{field}, which is already complete; a module runs once")
            placed[placement.module] = s, placement.gpus, placement.quota
    _place_losses(graph, mapping, placed)
    stages = []
    for name in names:
        slot, gpus, quota = placed[name]
        share = None if quota == mapping.steps else quota / mapping.steps
        layers = 0, graph.node(name).num_layers
        stages += [
            Stage(name, 0, layers, ranks[gpu], replica, quota=share, split=SAMPLES, slot=slot)
            for replica, gpu in enumerate(gpus)
        ]
    return Plan(graph, tuple(stages), num_microbatches, Slots.name)


def _place_losses(
    graph: ModuleGraph, mapping: Mapping, places: dict[str, tuple[int, tuple[int, ...], int]]
) -> None:
    """Place losses without a placement in additional slots, up to one per quota step of a GPU."""
    unplaced = [name for name in graph.topological if name not in places]
    for name in unplaced:
        if name not in graph.losses:
            raise PlanError(f"stages do not have module {name!r}; every module must run")
        if not graph.producers(name):
            raise PlanError(
                f"loss {name!r} reads no module; the mapping must place it explicitly"
            )
    for first in range(0, len(unplaced), mapping.steps):
        concurrent = unplaced[first : first + mapping.steps]
        gpus_of = {name: _last_gpus(graph, places, name) for name in concurrent}
        slot = len(mapping.stages) + first // mapping.steps
        for name, gpus in gpus_of.items():
            sharers = max(sum(gpu in loss_gpus for loss_gpus in gpus_of.values()) for gpu in gpus)
            places[name] = slot, gpus, mapping.steps // sharers


def _last_gpus(
    graph: ModuleGraph, places: ByName[str, tuple[int, tuple[int, ...], int]], name: str
) -> tuple[int, ...]:
    _, gpus, _ = max(places[producer] for producer in graph.producers(name))
    return gpus
