"""Who is to blame when processes do not go on: they are asked where they are.

Asked are all, where a connection is lost or a wait is over. A dead process is to blame; else one
that does not answer (stopped, or hung with the interpreter's lock); else the one that computes for
longest while another waits. Where none waits for another, a step is stuck once none has begun an
instruction for as long as a receive may take; a single longer instruction counts as that.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymm.actors.faults.stacks import Address, Look, end_process, look_at
from raymm.actors.faults.whereabouts import Report

# Seconds that a process has to say where it is. Its main thread need not be free for that; one
# that holds the interpreter's lock, or is stopped, says nothing.
ANSWER_TIMEOUT_S = 5.0
# Seconds in which processes are looked at from outside, all nodes at once and on each all of its
# processes: an error waits for that, so what a node does not say by then is missing.
LOOK_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Inquiry:
    """What processes said, by number.

    Attributes:
        reports: of those that answered.
        dead: of those that are dead, how Ray says it.
        silent: the others.
    """

    reports: Mapping[int, Report] = field(default_factory=dict)
    dead: Mapping[int, RayActorError] = field(default_factory=dict)
    silent: tuple[int, ...] = ()

    def culprits(self, long: float, aborted: Collection[int] = ()) -> list[int]:
        """Dead processes, then those that do not answer; else the one that has computed for longest
        while another waits for it. None if all wait, or none computes for long. Dead processes that
        ended by SIGABRT come last: NCCL's watchdog ends those that wait for another one so.

        Args:
            long: seconds of computing from which on others may have given up because of it.
            aborted: dead processes that ended by SIGABRT.
        """
        victims = sorted(self.dead.keys() & set(aborted))
        if causes := [*sorted(self.dead.keys() - set(aborted)), *sorted(self.silent)]:
            return [*causes, *victims]
        busy = {n: r for n, r in self.reports.items() if r.doing and not r.waits}
        longest = max(busy, key=lambda n: busy[n].seconds, default=None)
        if longest is None or busy[longest].seconds < long:
            return victims
        return [longest, *victims]

    def still(self) -> float:
        """Seconds since any of those that answer has begun something; infinite if none does."""
        return min((report.seconds for report in self.reports.values()), default=float("inf"))


def inquire(actors: Mapping[int, Any], timeout: float = ANSWER_TIMEOUT_S) -> Inquiry:
    """Ask where processes are, all at once.

    Args:
        actors: handles of :class:`raymm.actors.faults.observed_actor.ObservedActor`, by number.
        timeout: seconds for all answers.
    """
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
    """States and stacks of processes, each looked at on its own node; those of nodes that do not
    answer within :data:`LOOK_TIMEOUT_S` are missing.

    Args:
        processes: by number.
        end: those to kill afterwards: one that is stopped does not obey Ray.
    """
    return _on_their_nodes(processes, end, everywhere=True, look=True)


def kill_from_outside(processes: Mapping[int, Address], everywhere: bool = True) -> None:
    """Kill processes, on their own nodes: one that is stopped does not obey Ray.

    Args:
        processes: by number.
        everywhere: not on this node only.
    """
    _on_their_nodes(processes, processes, everywhere, look=False)


def visit(processes: Mapping[int, Address], end: Collection[int], look: bool) -> dict[int, Look]:
    """Look at processes of this node, all at once, and then kill some.

    Args:
        processes: by number.
        end: those to kill.
        look: whether to look at all of them before.
    """
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
    of_node: dict[str, dict[int, Address]] = {own_node: {}}
    for number, address in processes.items():
        if everywhere or address.node == own_node:
            of_node.setdefault(address.node, {})[number] = address
    nearby = of_node.pop(own_node)
    remote = ray.remote(num_cpus=0, max_retries=0)(visit)
    refs = [
        remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(there, [number for number in end if number in there], look)
        for node, there in of_node.items()
    ]
    answers = visit(nearby, [number for number in end if number in nearby], look)
    if refs:
        left = max(0.0, deadline - time.monotonic())
        ray.wait(refs, num_returns=len(refs), timeout=left)
    for ref in refs:
        try:
            answers |= ray.get(ref, timeout=0)
        except (GetTimeoutError, RayError):
            continue
    return answers
