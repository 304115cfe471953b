"""The simulator: a program and costs in, a predicted Timeline out."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.program import COMPUTE, Op, Program, ProgramError, group_end
from raymm.scheduler.program.timeline import Span, Timeline
from raymm.scheduler.schedule.network import Transfer


def simulate(
    program: Program,
    costs: Mapping[tuple[StageId, Op], float],
    latency: float = 0.0,
    transfers: Mapping[Edge, Transfer] | None = None,
    microbatch_costs: Mapping[tuple[StageId, Op, int], float] | None = None,
) -> Timeline:
    """Run a program on paper.

    Args:
        program: what each rank does.
        costs: seconds per (stage, compute op) on a whole device; on a quota that many times
            more (an upper bound: a module that does not fill a device loses less). What is
            missing takes no time.
        latency: seconds from a SEND until the message can be received, on edges that
            ``transfers`` does not have.
        transfers: what a message takes, per directed edge. Messages of one edge go one after
            another; a rank computes on while they do.
        microbatch_costs: seconds per (stage, compute op, microbatch), before ``costs``.

    Returns:
        Compute spans and the waits of receives. Collective instructions take no time.

    Raises:
        ProgramError: if the program deadlocks.
    """
    clock = [0.0] * len(program.ranks)
    position = [0] * len(program.ranks)
    arrivals: dict[Edge, deque[float]] = defaultdict(deque)
    spans: list[Span] = []
    # Any order that respects the queues gives the same times: a rank's clock depends only
    # on its own past and on arrival times, which are fixed when the sender gets there.
    runnable = deque(range(len(program.ranks)))
    waiting: dict[Edge, int] = {}
    transfers, of_microbatch = transfers or {}, microbatch_costs or {}
    default = Transfer(0.0, latency)
    link_free: dict[Edge, float] = defaultdict(float)
    while runnable:
        rank = runnable.popleft()
        instructions = program.ranks[rank]
        while position[rank] < len(instructions):
            instruction = instructions[position[rank]]
            start = clock[rank]
            if instruction.op is Op.RECV:
                queue = arrivals[instruction.edge]
                if not queue:
                    waiting[instruction.edge] = rank
                    break
                clock[rank] = max(start, queue.popleft())
            elif instruction.op is Op.SEND:
                transfer = transfers.get(instruction.edge, default)
                sent = max(start, link_free[instruction.edge]) + transfer.seconds
                link_free[instruction.edge] = sent
                arrivals[instruction.edge].append(sent + transfer.latency)
                if instruction.edge in waiting:
                    runnable.append(waiting.pop(instruction.edge))
            elif instruction.group < 0 and instruction.op in COMPUTE:
                key = (instruction.stage, instruction.op)
                seconds = of_microbatch.get((*key, instruction.microbatch))
                clock[rank] += costs.get(key, 0.0) if seconds is None else seconds
            elif instruction.group >= 0:
                after = group_end(instructions, position[rank])
                ends: dict[str, float] = {}  # by module
                for one in instructions[position[rank] : after]:
                    key, module = (one.stage, one.op), one.stage.module
                    seconds = of_microbatch.get((*key, one.microbatch))
                    whole = costs.get(key, 0.0) if seconds is None else seconds
                    begin = ends.get(module, start)
                    ends[module] = begin + whole / one.quota
                    spans.append(
                        Span(rank, one.op, one.stage, one.microbatch, begin, ends[module],
                             quota=one.quota)
                    )  # fmt: skip
                clock[rank] = max(ends.values())
                position[rank] = after
                continue
            if instruction.op in COMPUTE or (instruction.op is Op.RECV and clock[rank] > start):
                spans.append(
                    Span(
                        rank, instruction.op, instruction.stage, instruction.microbatch,
                        start, clock[rank], instruction.peer,
                    )
                )
            position[rank] += 1
    for rank, instructions in enumerate(program.ranks):
        if position[rank] < len(instructions):
            raise ProgramError(f"deadlock: rank {rank} waits in {instructions[position[rank]]}")
    return Timeline(tuple(spans), len(program.ranks))
