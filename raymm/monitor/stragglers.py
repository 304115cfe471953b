"""A rank whose process computes slower than its plan, or than it did itself; others do not."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from raymm.monitor.rebalancing import WARM_UP_STEPS
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.stage_costs import op_seconds

# A rank that takes so many times what was expected, beside what others take of what was expected of
# them, for so many steps on end is a straggler.
TIMES, STEPS = 1.5, 20
# Without a profile in the plan: steps whose medians say what is expected. Replicas are held to the
# quickest of them, so one that is slow from the beginning is found, too.
BASELINE_STEPS = 10


class Straggler(NamedTuple):
    """A rank that is too slow.

    Attributes:
        rank: of the plan.
        times: as much time as others take of what is expected of them.
    """

    rank: int
    times: float


Kind = tuple[str, int, Op]
"""Module, stage's index and op: alike on all replicas."""


class StragglerFinder:
    """Compares every step's compute with what is expected.

    Args:
        plan: of the run.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._expected: dict[Kind, float] = {}
        if plan.profile is not None:
            self._expected = {_kind(stage, op): s for (stage, op), s in op_seconds(plan).items()}
        self._first: dict[StageId, dict[Op, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._seen, self._above, self._of = 0, 0, -1

    def observe(self, timeline: Timeline) -> Straggler | None:
        """Add a step. The rank that has been too slow for :data:`STEPS`; None: there is none.

        Args:
            timeline: of the step.
        """
        self._seen += 1
        if self._seen <= WARM_UP_STEPS:
            return None
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
        """The slowest rank of a step, beside the median of the others; None without others.

        Args:
            timeline: of the step.
        """
        measured: dict[int, float] = defaultdict(float)
        expected: dict[int, float] = defaultdict(float)
        for span in timeline.compute():
            due = self._expected.get(_kind(span.stage, Op(span.op)))
            if due:
                measured[span.rank] += span.device_seconds
                expected[span.rank] += due
        times = {rank: measured[rank] / expected[rank] for rank in measured}
        if len(times) < 2:
            return None
        rank = max(times, key=lambda each: times[each])
        others = statistics.median(value for other, value in times.items() if other != rank)
        return Straggler(rank, times[rank] / others) if others else None

    def replaced(self) -> None:
        """Another process has come in its place."""
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
    """Says once of every rank that it is a straggler.

    Args:
        plan: of the run.
        say: prints a line.
    """

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan, self._finder, self._say = plan, StragglerFinder(plan), say
        self._said: set[int] = set()
        self._replaced: Counter[int] = Counter()  # processes of each rank
        self._straggler: Straggler | None = None

    def after_step(self, step: int, timeline: Timeline) -> Mapping[str, Any]:
        """For ``metrics.jsonl``, under ``straggler``: the ``rank``, and how many ``times`` slower
        than others it is; nothing without one.

        Args:
            step: its number.
            timeline: of the step.
        """
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
        """The process that another one could take the place of, and why, in words that continue
        its name. Of a rank of several processes, of which nobody knows which one the others wait
        for, each in turn, until the rank is as quick as others. None: there is none, or others
        were as slow in the places of all of them before.
        """
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
        """That is done."""
        if self._straggler is not None:
            self._replaced[self._straggler.rank] += 1
            self._said.discard(self._straggler.rank)
        self._straggler = None
        self._finder.replaced()


def _kind(stage: StageId, op: Op) -> Kind:
    return stage.module, stage.index, op
