"""NCCL's execution of a program, without times: slow, and obviously right.

A process issues operations one after another. Each enters a FIFO queue of the process. A message or
a sum is done once it is at the head of a queue on every participating process and its inputs have
been computed there; a computation that waits for a message, once that is done. Nothing else is
assumed: an operation may take any time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from raymm.scheduler.program.issue_order import Issue, SharedGradients
from raymm.scheduler.program.program import BACKWARDS, OPTIMIZER_OPS, Op, Program

COMPUTE = "compute"
"""Communicator of a process's own work."""


class Operation(NamedTuple):
    """Operation of a process: kind, name shared by all participants, and communicator."""

    kind: str  # "compute", "wait", "message" or "sum"
    name: Hashable
    communicator: Hashable


Processes = Sequence[Sequence[Operation]]
"""Issued operations of each process, in order."""


def operations(
    program: Program, issues: Sequence[Sequence[Issue]], shared: Sequence[SharedGradients] = ()
) -> list[list[Operation]]:
    """Return the operations that each rank issues.

    There is a communicator for each ordered pair of ranks, one for each set of stages that shares
    gradients, and one for all ranks. Sums that are not in ``issues`` begin with REDUCE_GRADS.
    """
    home = {i.stage: rank for rank, listed in enumerate(program) for i in listed if i.stage.module}
    processes = []
    for rank, instructions in enumerate(program):
        result: list[Operation] = []
        counted: dict[Hashable, int] = defaultdict(int)
        begun = set()
        last = {
            key.stages: max(
                (n for n, i in enumerate(instructions)
                 if i.op in BACKWARDS and i.stage.first_replica in key.stages), default=-1,
            )
            for key in shared
        }

        def message(edge, result=result, counted=counted) -> None:
            name = edge, counted[edge]
            counted[edge] += 1
            result.append(Operation("message", name, (home[edge[0]], home[edge[1]])))

        def sum_of(stages, result=result, begun=begun) -> None:
            begun.add(stages)
            result.append(Operation("sum", stages, stages))

        for number, i in enumerate(instructions):
            begins = [issue for issue in issues[rank] if issue.before == number]
            inside = [b.stages for b in begins if b.stages and last[b.stages] == number]
            for issue in begins:
                if not issue.stages:
                    message(issue.edge)
                elif issue.stages not in inside:
                    sum_of(issue.stages)
            if i.op is Op.SEND:
                message(i.edge)
            elif i.op is Op.RECV:
                counted["taken", i.edge] += 1
                name = i.edge, counted["taken", i.edge] - 1
                result.append(Operation("wait", name, COMPUTE))
            elif i.op in OPTIMIZER_OPS:
                if i.op is Op.REDUCE_GRADS:
                    for stages, ranks in shared:
                        if rank in ranks and stages not in begun:
                            sum_of(stages)
                result.append(Operation("sum", (i.op, number - len(instructions)), "all"))
            else:
                result.append(Operation("compute", (rank, number), COMPUTE))
            for stages in inside:
                sum_of(stages)
        processes.append(result)
    return processes


def stuck(
    processes: Processes,
    queue: Callable[[int, Hashable], Hashable],
    host_waits: bool = True,
    host_blocks: bool = False,
) -> dict[int, Operation]:
    """Return operations that cannot end, by process; empty if all end.

    Args:
        processes: issued operations of each process.
        queue: queue of a process and a communicator.
        host_waits: True if a process issues nothing while it waits for a message.
        host_blocks: True if it issues nothing while any issued operation is in flight.
    """
    members: dict[Hashable, set[int]] = defaultdict(set)
    for process, listed in enumerate(processes):
        for operation in listed:
            if operation.kind in ("message", "sum"):
                members[operation.name].add(process)
    issued = [0] * len(processes)
    queues: list[dict[Hashable, deque[tuple[int, Operation]]]] = [
        defaultdict(deque) for _ in processes
    ]
    done: set[Hashable] = set()
    computed: list[set[int]] = [set() for _ in processes]  # numbers of computed operations

    def at_head(process: int, name: Hashable) -> bool:
        for line in queues[process].values():
            if line and line[0][1].name == name and line[0][1].kind != "wait":
                number = line[0][0]
                before = processes[process][:number]
                return all(
                    n in computed[process] for n, o in enumerate(before)
                    if o.communicator == COMPUTE
                )
        return False

    progressed = True
    while progressed:
        progressed = False
        for process, listed in enumerate(processes):
            while issued[process] < len(listed):
                operation = listed[issued[process]]
                if host_blocks and any(queues[process].values()):
                    break
                if host_waits and operation.kind == "wait" and operation.name not in done:
                    break
                line = queues[process][queue(process, operation.communicator)]
                line.append((issued[process], operation))
                issued[process] += 1
                progressed = True
        for process in range(len(processes)):
            for line in queues[process].values():
                if not line:
                    continue
                number, operation = line[0]
                if operation.kind == "compute" or (
                    operation.kind == "wait" and operation.name in done
                ):
                    line.popleft()
                    computed[process].add(number)
                    progressed = True
                elif operation.kind != "wait" and all(
                    at_head(member, operation.name) for member in members[operation.name]
                ):
                    done.add(operation.name)
                    for member in members[operation.name]:
                        for other in queues[member].values():
                            # A wait for it, which has its name, is not over yet.
                            if other and other[0][1][:2] == operation[:2]:
                                other.popleft()
                    progressed = True
    return {
        process: next((line[0][1] for line in queues[process].values() if line), None)
        or listed[issued[process]]
        for process, listed in enumerate(processes)
        if issued[process] < len(listed) or any(queues[process].values())
    }
