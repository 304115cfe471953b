"""Straggler detection: ranks that are slower than predicted, relative to their peers."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from raymm.monitor.observed_run import WARM_UP_STEPS
from raymm.scheduler.plan.microbatch_groups import group_spans
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.program.timeline import Timeline, spread
from raymm.scheduler.schedule.stage_costs import op_seconds

# A rank is a straggler if it takes TIMES as long as expected, relative to the other ranks, for
# STEPS consecutive steps.
TIMES, STEPS = 1.5, 20
# Steps whose median times are the expectation if the plan has no profile. Replicas are compared
# with the fastest of them, so a replica that is slow from the start is detected, too.
BASELINE_STEPS = 10


class Straggler(NamedTuple):
    """Rank that is too slow.

    Attributes:
        times: its time over the expected time, relative to the median of the other ranks.
    """

    rank: int
    times: float


Kind = tuple[str, int, Op]
"""Module, stage index and op: equal for all replicas."""


class StragglerFinder:
    """Compares the compute of each step with its expectation."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._expected: dict[Kind, float] = {}
        if plan.profile is not None:
            self._expected = {_kind(stage, op): s for (stage, op), s in op_seconds(plan).items()}
        self._first: dict[StageId, dict[Op, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._seen, self._above, self._of = 0, 0, -1

    def observe(self, timeline: Timeline) -> Straggler | None:
        """Add a step. Return the rank that was too slow in the last :data:`STEPS` steps, if any."""
        self._seen += 1
        if self._seen <= WARM_UP_STEPS:
            return None
        timeline = spread(timeline, group_spans(self._plan))
        if self._plan.profile is None and self._seen <= WARM_UP_STEPS + BASELINE_STEPS:
            self._note(timeline)
            return None
        slowest = self.slowest(timeline)
        if slowest is None or slowest.times < TIMES:
            self._above = 0
            return None
        self._above = self._above + 1 if slowest.rank == self._of else 1
        self._of = slowest.rank
        return slowest if self._above >= STEPS else None

    def slowest(self, timeline: Timeline) -> Straggler | None:
        """Return the slowest rank of a step relative to the median of the others; None without
        others."""
        measured: dict[int, float] = defaultdict(float)
        expected: dict[int, float] = defaultdict(float)
        for span in timeline.compute():
            seconds = self._expected.get(_kind(span.stage, Op(span.op)))
            if seconds:
                measured[span.rank] += span.device_seconds
                expected[span.rank] += seconds
        times = {rank: measured[rank] / expected[rank] for rank in measured}
        if len(times) < 2:
            return None
        rank = max(times, key=lambda each: times[each])
        peers_median = statistics.median(value for peer, value in times.items() if peer != rank)
        return Straggler(rank, times[rank] / peers_median) if peers_median else None

    def replaced(self) -> None:
        """Reset the count of slow steps after the process was replaced."""
        self._above = 0

    def _note(self, timeline: Timeline) -> None:
        for span in timeline.compute():
            self._first[span.stage][Op(span.op)].append(span.device_seconds)
        quickest: dict[Kind, float] = {}
        for stage, ops in self._first.items():
            for op, seconds in ops.items():
                kind, median = _kind(stage, op), statistics.median(seconds)
                quickest[kind] = min(median, quickest.get(kind, median))
        self._expected = quickest


class StragglerObserver:
    """Reports each straggler once."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan, self._finder, self._say = plan, StragglerFinder(plan), say
        self._said: set[int] = set()
        self._replaced: Counter[int] = Counter()  # number of replaced processes by rank
        self._straggler: Straggler | None = None

    def after_step(self, step: int, timeline: Timeline) -> Mapping[str, Any]:
        """Return the step's entry ``straggler`` for ``metrics.jsonl``: the ``rank``, and how many
        ``times`` slower than others it is. Empty without a straggler."""
        self._straggler = slow = self._finder.observe(timeline)
        if slow is None:
            return {}
        if slow.rank not in self._said:
            self._said.add(slow.rank)
            self._say(
                f"step {step:>5}  straggler: rank {slow.rank} takes {slow.times:.1f} times as long "
                f"as planned, relative to the other ranks, for {STEPS} steps in a row"
            )
        return {"straggler": {"rank": slow.rank, "times": round(slow.times, 2)}}

    def replaceable(self) -> tuple[int, str] | None:
        """Return the process to replace, and a reason that continues its name; None if there is
        none. For a rank of several processes, it is unknown which one delays the others. They are
        replaced in turn until the rank is fast enough. None is returned once all have been replaced
        without success."""
        slow = self._straggler
        if slow is None:
            return None
        processes, tried = self._plan.rank_processes(slow.rank), self._replaced[slow.rank]
        if tried == len(processes):
            return None
        why = f"is a straggler: it takes {slow.times:.1f} times as long as expected"
        if len(processes) > 1:
            why = (
                f"may be why rank {slow.rank} is a straggler, {tried + 1} of {len(processes)} "
                f"processes in turn: the rank takes {slow.times:.1f} times as long as expected"
            )
        return processes[tried], why

    def replaced(self) -> None:
        """Record that the process was replaced."""
        if self._straggler is not None:
            self._replaced[self._straggler.rank] += 1
            self._said.discard(self._straggler.rank)
        self._straggler = None
        self._finder.replaced()


def _kind(stage: StageId, op: Op) -> Kind:
    return stage.module, stage.index, op
