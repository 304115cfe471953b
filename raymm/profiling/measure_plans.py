"""Measurement of plans by running them, to choose among them (OmniBal §4.2 does so with
partitions)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raymm.actors.rank.rank_resources import check_capacity
from raymm.errors import PlanError
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.parallel_model import ParallelModel
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.search.evaluation import Option

WARM_UP_STEPS = 2
STEPS = 5


@dataclass(frozen=True)
class Measured:
    """Plan that was run: its median seconds per step, and the seconds of each step."""

    option: Option
    seconds: float
    steps: tuple[float, ...]

    @property
    def error(self) -> float:
        """Relative error of the prediction: 0.1 if the step takes 10% longer than predicted."""
        return self.seconds / self.option.seconds - 1


def distinct_options(options: Sequence[Option], count: int) -> list[Option]:
    """Return the first options that differ in what runs where or when. Options with different names
    may be equal: a zero-bubble schedule without improvement is 1F1B. Raise a ``PlanError`` if
    ``count`` is below 1."""
    if count < 1:
        raise PlanError(f"measure is {count}; it must be at least 1")
    chosen: dict[Any, Option] = {}
    for option in options:
        if len(chosen) == count:
            break
        key = _places(option.plan), full_program(option.plan).ranks
        chosen.setdefault(key, option)
    return list(chosen.values())


def measure_options(
    model: MultimodalModule,
    options: Sequence[Option],
    microbatch: Mapping[str, Any],
    *,
    steps: int = STEPS,
    say: Callable[[Measured], None] = lambda _: None,
    **runtime: Any,
) -> list[Measured]:
    """Run plans on the connected cluster, one after another, in the order given.

    Every microbatch of a step is the same real one, as the predictions assume. Ranks are started
    once for all plans that differ only in their schedule, and ended before the next ones are
    started. Raise a ``ClusterError`` before anything starts if the cluster is too small for a plan.

    Args:
        steps: measured steps per plan, after :data:`WARM_UP_STEPS`.
    """
    reserved = RuntimeOptions.of(runtime).reserved
    check_capacity(max(option.plan.num_processes for option in options), reserved)
    groups: dict[Any, list[Option]] = {}
    for option in options:
        groups.setdefault(_places(option.plan), []).append(option)
    results: dict[int, Measured] = {}
    for group in groups.values():
        with ParallelModel(model, group[0].plan, **runtime) as parallel:
            for option in group:
                parallel.reschedule(option.plan)
                seconds = _run(parallel, microbatch, steps)
                results[id(option)] = Measured(option, statistics.median(seconds), seconds)
                say(results[id(option)])
    return [results[id(option)] for option in options]


def _places(plan: Plan) -> Any:
    return tuple(sorted((s.id, s.layers, s.rank, s.degrees, s.sharding) for s in plan.stages))


def _run(
    parallel: ParallelModel, microbatch: Mapping[str, Any], steps: int
) -> tuple[float, ...]:
    prepared = parallel.prepare([microbatch] * parallel.plan.num_microbatches)
    seconds = []
    for _ in range(WARM_UP_STEPS + steps):
        seconds.append(parallel.submit(prepared).result().timeline.makespan)
        parallel.optimizer.zero_grad()
    return tuple(seconds[WARM_UP_STEPS:])
