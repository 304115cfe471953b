"""Detection of processes that hang, and inquiry into which process is at fault when processes make
no progress.

All processes report their current operation when a connection is lost or a wait times out. A dead
process is at fault; otherwise a process that does not answer (stopped, or hung with the
interpreter's lock); otherwise the process that has computed for longest while another one waits. If
no process waits, a step is stuck once no process has started an instruction for as long as a
receive may take; a single longer instruction counts as stuck.

A process hangs if an operation takes five times as long as the longest operation of the same kind
so far, and at least ten seconds. Processes that wait for it do not count as hanging. An operation
that the process has never run before (a first forward may compile for minutes) may take as long as
the timeout for other processes. The same applies after a wrong suspicion.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymm.actors.faults.stacks import Address, Look, end_process, look_at
from raymm.actors.faults.task_tracker import OWN_TASKS, Report

# Seconds for a process to report. Its main thread need not be free for that. A process that is
# stopped or holds the interpreter's lock does not answer.
ANSWER_TIMEOUT_S = 5.0
# Seconds for inspecting processes from outside, on all nodes at once. The error message waits for
# it and omits nodes that have not answered by then.
LOOK_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Inquiry:
    """Reports of processes, by number."""

    reports: Mapping[int, Report] = field(default_factory=dict)
    dead: Mapping[int, RayActorError] = field(default_factory=dict)
    silent: tuple[int, ...] = ()

    def culprits(self, long: float, aborted: Collection[int] = ()) -> list[int]:
        """Return the processes at fault, the most likely one first. These are dead processes, then
        processes that do not answer; otherwise the process that has computed for longest while
        another one waits for it, if for at least ``long`` seconds. Dead processes that ended by
        SIGABRT (``aborted``) come last: NCCL's watchdog ends waiting processes in this way."""
        victims = sorted(self.dead.keys() & set(aborted))
        if causes := [*sorted(self.dead.keys() - set(aborted)), *sorted(self.silent)]:
            return [*causes, *victims]
        busy = {n: r for n, r in self.reports.items() if r.doing and not r.waits}
        longest = max(busy, key=lambda n: busy[n].seconds, default=None)
        if longest is None or busy[longest].seconds < long:
            return victims
        return [longest, *victims]

    def still(self) -> float:
        """Return the seconds since any process that answered started an operation; infinite if none
        did."""
        return min((report.seconds for report in self.reports.values()), default=float("inf"))


def inquire(actors: Mapping[int, Any], timeout: float = ANSWER_TIMEOUT_S) -> Inquiry:
    """Query what processes are doing, all at once, with ``timeout`` seconds for all answers."""
    refs = {number: actor.where.remote() for number, actor in actors.items()}
    ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout)
    reports: dict[int, Report] = {}
    dead: dict[int, RayActorError] = {}
    for number, ref in refs.items():
        try:
            reports[number] = ray.get(ref, timeout=0)
        except GetTimeoutError:
            continue
        except RayActorError as error:
            dead[number] = error
        except RayError:
            continue
    silent = tuple(number for number in refs if number not in reports and number not in dead)
    return Inquiry(reports, dead, silent)


def look_from_outside(
    processes: Mapping[int, Address], end: Collection[int] = ()
) -> dict[int, Look]:
    """Return states and stacks of processes, each inspected on its own node, and kill those in
    ``end``. Nodes that do not answer within :data:`LOOK_TIMEOUT_S` are omitted."""
    return _on_their_nodes(processes, end, everywhere=True, look=True)


def kill_from_outside(processes: Mapping[int, Address], everywhere: bool = True) -> None:
    """Kill processes on their own nodes, or those of this node only. Unlike Ray, this ends stopped
    ones."""
    _on_their_nodes(processes, processes, everywhere, look=False)


def visit(processes: Mapping[int, Address], end: Collection[int], look: bool) -> dict[int, Look]:
    """Inspect processes of this node, all at once, unless ``look`` is False; then kill those in
    ``end``."""
    looks: dict[int, Look] = {}
    if look:
        with ThreadPoolExecutor(max(1, len(processes))) as threads:
            looks = dict(zip(processes, threads.map(look_at, processes.values()), strict=True))
    for number in end:
        end_process(processes[number].pid)
    return looks


def _on_their_nodes(
    processes: Mapping[int, Address], end: Collection[int], everywhere: bool, look: bool
) -> dict[int, Look]:
    deadline = time.monotonic() + LOOK_TIMEOUT_S
    own_node = ray.get_runtime_context().get_node_id()
    by_node: dict[str, dict[int, Address]] = {own_node: {}}
    for number, address in processes.items():
        if everywhere or address.node == own_node:
            by_node.setdefault(address.node, {})[number] = address
    nearby = by_node.pop(own_node)
    remote = ray.remote(num_cpus=0, max_retries=0)(visit)
    refs = [
        remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(node_processes, [number for number in end if number in node_processes], look)
        for node, node_processes in by_node.items()
    ]
    answers = visit(nearby, [number for number in end if number in nearby], look)
    if refs:
        remaining = max(0.0, deadline - time.monotonic())
        ray.wait(refs, num_returns=len(refs), timeout=remaining)
    for ref in refs:
        try:
            answers |= ray.get(ref, timeout=0)
        except (GetTimeoutError, RayError):
            continue
    return answers


# Shortest limit in seconds: a machine may pause, a page may be swapped in, a disk may be slow.
LEAST_S = 10.0
# Limit of an operation as a multiple of the longest one of the same kind.
TIMES = 5.0
# Seconds between two checks. A process is reported one interval before it reaches its limit.
BEAT_S = 1.0
STOPPED = "stopped by a signal"


class Overdue(NamedTuple):
    """Process that takes too long, and the reason as text."""

    number: int
    why: str


class Heartbeats:
    """Durations that processes have reported so far. ``patience`` is the longest time that any
    operation may take, in seconds."""

    def __init__(self, patience: float) -> None:
        # A process that waits for a late one reports it first, when its wait times out.
        self._most = patience + 2 * BEAT_S
        self._longest: dict[int, dict[str, float]] = {}
        self._silent_since: dict[int, float] = {}

    def overdue(
        self, inquiry: Inquiry, now: float, look: Callable[[Collection[int]], Mapping[int, Look]]
    ) -> Overdue | None:
        """Record the processes' reports, and return the process that exceeds its limit by the
        largest factor; None if no process does. ``now`` is in seconds; ``look`` returns processes
        as seen from outside."""
        late: list[tuple[float, Overdue]] = []
        for number, report in inquiry.reports.items():
            self._silent_since.pop(number, None)
            self._note(number, report)
            for kind, seconds in self._under_way(report).items():
                limit = self._limit(number, kind)
                if seconds + BEAT_S >= limit:
                    why = f"in {kind}, {self._before(number, kind)}"
                    late.append((seconds / limit, Overdue(number, why)))
        silent = {
            number: now - self._silent_since.setdefault(number, now) + 2 * BEAT_S
            for number in inquiry.silent
        }
        late += self._of_silent({n: s for n, s in silent.items() if s >= LEAST_S}, look)
        return max(late, default=(0.0, None), key=lambda each: each[0])[1]

    def forget(self, number: int) -> None:
        """Forget a process's durations, so that its operations may take as long as first ones."""
        self._silent_since.pop(number, None)
        self._longest.pop(number, None)

    def replaced(self, number: int) -> None:
        """Note that a new process has taken the place of one; recorded durations are kept."""
        self._silent_since.pop(number, None)

    def _note(self, number: int, report: Report) -> None:
        longest = self._longest.setdefault(number, {})
        for kind, seconds in report.longest.items():
            longest[kind] = max(seconds, longest.get(kind, 0.0))

    @staticmethod
    def _under_way(report: Report) -> dict[str, float]:
        """Return the seconds of operations in progress that do not wait for other processes, by
        kind."""
        current = {report.kind: report.seconds} if report.kind and not report.waits else {}
        return {**report.in_threads, **current}

    def _limit(self, number: int, kind: str) -> float:
        longest = self._longest.get(number, {})
        seconds = longest.get(kind)
        if seconds is None and kind in OWN_TASKS:
            seconds = max(longest.values(), default=None)
        return self._most if seconds is None else min(self._most, max(LEAST_S, TIMES * seconds))

    def _before(self, number: int, kind: str) -> str:
        seconds = self._longest.get(number, {}).get(kind)
        return (
            "which it has not done before" if seconds is None
            else f"which took at most {seconds:.2f} s before"
        )

    def _of_silent(
        self, silent: Mapping[int, float], look: Callable[[Collection[int]], Mapping[int, Look]]
    ) -> list[tuple[float, Overdue]]:
        """Return silent processes that exceed their limit, which is shortest for stopped processes.
        A process that holds the interpreter's lock may be computing."""
        if not silent:
            return []
        looks, late = look(silent.keys()), []
        for number, seconds in silent.items():
            longest = self._longest.get(number, {}).values()
            limit = max(LEAST_S, TIMES * max(longest)) if longest else self._most
            state = looks[number].state if number in looks else "out of reach"
            if state == STOPPED:
                limit = LEAST_S
            limit = min(limit, self._most)
            if seconds + BEAT_S >= limit:
                late.append((seconds / limit, Overdue(number, f"silent for {seconds:.0f} s")))
        return late
