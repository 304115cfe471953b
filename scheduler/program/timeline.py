"""Timelines of the instructions of each rank, measured by actors or predicted by the simulator."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from raymm.scheduler.plan.stage import NO_STAGE, StageId
from raymm.scheduler.program.program import COMPUTE, Op

_start = attrgetter("start")


class Span(NamedTuple):
    """Execution of one instruction.

    Times are seconds since the step's start; a RECV span is the time spent waiting for the message.
    ``peer`` is set for SEND and RECV. ``quota`` is the share of the rank's multiprocessors.
    """

    rank: int
    op: str
    stage: StageId
    microbatch: int
    start: float
    end: float
    peer: StageId = NO_STAGE
    quota: float = 1.0

    @property
    def device_seconds(self) -> float:
        """Seconds on the whole device, assuming that time is inversely proportional to the quota,
        as in the costs of the simulator."""
        return (self.end - self.start) * self.quota


@dataclass(frozen=True)
class Timeline:
    """Spans of one step over all ranks, from the executor or the simulator."""

    spans: tuple[Span, ...]
    num_ranks: int

    def __repr__(self) -> str:
        return (
            f"Timeline({self.num_ranks} ranks, {len(self.spans)} spans, "
            f"{self.makespan:.4g} s, bubble {self.mean_bubble:.0%})"
        )

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(s.end for s in self.spans) - min(s.start for s in self.spans)

    def compute(self) -> tuple[Span, ...]:
        return tuple(s for s in self.spans if s.op in COMPUTE)

    def busy(self, rank: int) -> float:
        """Return the seconds that a rank computes; concurrent spans count once."""
        total, until = 0.0, -math.inf
        for span in sorted((s for s in self.compute() if s.rank == rank), key=_start):
            total += max(0.0, span.end - max(span.start, until))
            until = max(until, span.end)
        return total

    def bubble(self, rank: int) -> float:
        """Return the fraction of the step in which a rank computes nothing."""
        return 1.0 - self.busy(rank) / self.makespan if self.makespan else 0.0

    @property
    def mean_bubble(self) -> float:
        return sum(map(self.bubble, range(self.num_ranks))) / max(1, self.num_ranks)

    def stage_busy(self) -> dict[StageId, float]:
        """Return the seconds of compute per stage."""
        busy: dict[StageId, float] = {}
        for span in self.compute():
            busy[span.stage] = busy.get(span.stage, 0.0) + span.end - span.start
        return busy

    def costs(self) -> dict[tuple[StageId, Op], float]:
        """Return the median :attr:`Span.device_seconds` per (stage, compute op), the costs of the
        simulator."""
        samples: dict[tuple[StageId, Op], list[float]] = {}
        for span in self.compute():
            samples.setdefault((span.stage, Op(span.op)), []).append(span.device_seconds)
        return {key: statistics.median(values) for key, values in samples.items()}

    def to_json(self) -> str:
        return json.dumps({"num_ranks": self.num_ranks, "spans": [list(s) for s in self.spans]})

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        data = json.loads(text)
        return cls(
            tuple(
                Span(rank, op, StageId(*stage), microbatch, start, end, StageId(*peer), quota)
                for rank, op, stage, microbatch, start, end, peer, quota in data["spans"]
            ),
            data["num_ranks"],
        )


def spread(timeline: Timeline, spans: Mapping[StageId, int]) -> Timeline:
    """Return a measured timeline in which all microbatches of a group that share a forward and a
    backward (:func:`raymm.scheduler.plan.microbatch_groups.group_spans`) took equally long, to
    derive costs per microbatch. Starts are unchanged, so that spans may overlap."""
    if not spans:
        return timeline
    groups: dict[tuple[StageId, str, int], list[float]] = {}
    for span in timeline.compute():
        if span.stage in spans:
            key = span.stage, span.op, span.microbatch // spans[span.stage]
            groups.setdefault(key, []).append(span.end - span.start)

    def even(span: Span) -> Span:
        if span.stage not in spans or span.op not in COMPUTE:
            return span
        seconds = groups[span.stage, span.op, span.microbatch // spans[span.stage]]
        return span._replace(end=span.start + statistics.fmean(seconds))

    return Timeline(tuple(map(even, timeline.spans)), timeline.num_ranks)


def chrome_trace(
    timelines: Iterable[tuple[str, Timeline]], rank_names: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """Return (label, timeline) pairs as a Chrome/Perfetto trace: one process per timeline, one
    thread per rank, and one thread for each module that runs concurrently with others."""
    events: list[dict[str, Any]] = []
    for pid, (label, timeline) in enumerate(timelines):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": label}})
        for rank in range(timeline.num_ranks):
            events.append(_thread(pid, rank, _rank_name(rank, rank_names)))
        threads: dict[tuple[int, str], int] = {}  # threads of (rank, module)
        for span in timeline.spans:
            tid = span.rank
            if span.quota < 1:
                key = span.rank, span.stage.module
                if key not in threads:
                    threads[key] = timeline.num_ranks + len(threads)
                    name = f"{_rank_name(span.rank, rank_names)}, {key[1]} on {span.quota:g}"
                    events.append(_thread(pid, threads[key], name))
                tid = threads[key]
            events.append(
                {
                    "ph": "X",
                    "name": f"{span.op} {span.stage} #{span.microbatch}"
                    if span.microbatch >= 0
                    else span.op,
                    "cat": span.op,
                    "pid": pid,
                    "tid": tid,
                    "ts": span.start * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                    "args": {
                        "stage": str(span.stage), "microbatch": span.microbatch,
                        "peer": str(span.peer),
                    },
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rank_name(rank: int, names: Mapping[int, str] | None) -> str:
    return (names or {}).get(rank, f"rank {rank}")


def _thread(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
