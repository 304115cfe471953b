"""The simulator equals longest paths over every dependency between instructions."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import InternalError
from raymm.scheduler.graph.module_graph import MESSAGE_BOUND
from raymm.scheduler.plan.stage import NO_STAGE, Edge, StageId
from raymm.scheduler.program.program import COMPUTE, OPTIMIZER_OPS, Instruction, Op, Program
from raymm.scheduler.program.timeline import Span
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.simulate import simulate
from tests.support.random_plans import chain, costs_of, steps, uniform

FIRST, SECOND = map(StageId, "ab")


def longest_paths(program: Program, costs, latency: int, posted: int = 1) -> list[Span]:
    """Return spans with a bound of messages in flight, or without if a program would not end."""
    try:  # impossible dependencies are detected if everything takes some time
        relaxed(program, defaultdict(lambda: 1), 1, MESSAGE_BOUND, pause=1)
    except CycleError:
        return relaxed(program, costs, latency, 10**6)
    return relaxed(program, costs, latency, MESSAGE_BOUND, posted=posted)


class CycleError(Exception):
    """Error for dependencies that form a cycle."""


def relaxed(
    program: Program, costs, latency: int, bound: int, pause: int = 0, posted: int = 1
) -> list[Span]:
    """Return spans by relaxing "ends no sooner than" constraints until none is violated.

    An instruction starts when the previous one on its rank has ended. A receive ends no sooner than
    its edge's send of the same number, plus the latency, and a send no sooner than the receive
    ``bound`` before. If more receives than one are posted, the receive of the message ``bound``
    before is posted from the beginning, or since a receive began.
    """
    sends, receives = defaultdict(list), defaultdict(list)
    for r, rank in enumerate(program):
        for n, i in enumerate(rank):
            if i.op is Op.SEND:
                sends[i.edge].append((r, n))
            elif i.op is Op.RECV:
                receives[i.edge].append((r, n))
    sender = {
        place: sends[edge][k] for edge, places in receives.items()
        for k, place in enumerate(places)
    }
    taken = {
        place: receives[edge][k - bound] for edge, places in sends.items()
        for k, place in enumerate(places) if posted == 1 and 0 <= k - bound < len(receives[edge])
    }
    for edge, places in sends.items():
        for k, place in enumerate(places):
            message = k - bound
            if posted > 1 and message >= posted:
                r, n = receives[edge][message - (posted - 1)]  # posts the message's receive
                taken[place] = r, n - 1
    end = {(r, n): 0 for r, rank in enumerate(program) for n in range(len(rank))}
    for _ in range(len(end) + 1):
        changed = False
        for (r, n), value in end.items():
            i = program.ranks[r][n]
            least = end.get((r, n - 1), 0) + pause
            least += costs.get((i.stage, i.op), 0) if i.op in COMPUTE else 0
            if i.op is Op.RECV:
                least = max(least, end[sender[r, n]] + latency)
            if (r, n) in taken:
                least = max(least, end.get(taken[r, n], 0))
            if value < least:
                end[r, n] = least
                changed = True
        if not changed:
            break
    else:
        raise CycleError
    spans = []
    for (r, n), stop in end.items():
        i = program.ranks[r][n]
        start = end.get((r, n - 1), 0)
        if i.op in COMPUTE or (i.op in (Op.SEND, Op.RECV) and stop > start):
            spans.append(Span(r, i.op, i.stage, i.microbatch, start, stop, i.peer))
    return spans


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw any valid program, in the order of one possible run."""
    num_ranks = draw(st.integers(1, 4))
    stages = [StageId(f"s{r}", k) for r in range(num_ranks) for k in range(2)]
    ranks: list[list[Instruction]] = [[] for _ in range(num_ranks)]
    under_way: dict[Edge, list[int]] = defaultdict(list)

    def emit(op: Op, stage: StageId, microbatch: int, peer: StageId = NO_STAGE) -> None:
        ranks[stages.index(stage) // 2].append(Instruction(op, stage, microbatch, peer))

    def receive(edge: Edge) -> None:
        emit(Op.RECV, edge[1], under_way[edge].pop(0), edge[0])

    for number in range(draw(st.integers(0, 40))):
        what = draw(st.sampled_from(["compute", "send", "receive"]))
        waiting = [edge for edge, queue in under_way.items() if queue]
        stage = draw(st.sampled_from(stages))
        if what == "compute":
            emit(draw(st.sampled_from(sorted(COMPUTE))), stage, number)
        elif what == "receive" and waiting:
            receive(draw(st.sampled_from(waiting)))
        elif what == "send":
            peer = draw(st.sampled_from([s for s in stages if s != stage]))
            for microbatch in range(10 * number, 10 * number + draw(st.integers(1, 6))):
                emit(Op.SEND, stage, microbatch, peer)
                under_way[stage, peer].append(microbatch)
    for edge, queue in under_way.items():
        while queue:
            receive(edge)
    return Program(tuple(map(tuple, ranks)))


@given(st.data(), st.sampled_from([1, 2, MESSAGE_BOUND]))
def test_random_programs(data: st.DataObject, posted: int) -> None:
    program = data.draw(programs())
    keys = sorted({(i.stage, i.op) for rank in program for i in rank if i.op in COMPUTE})
    costs = {key: data.draw(st.integers(0, 9)) for key in keys if data.draw(st.booleans())}
    latency = data.draw(st.integers(0, 5))
    timeline = simulate(program, costs, latency, posted=posted)
    assert sorted(timeline.spans) == sorted(longest_paths(program, costs, latency, posted))
    assert timeline.num_ranks == len(program.ranks)


@given(st.data())
def test_random_plans(data: st.DataObject) -> None:
    plan, present = data.draw(steps())
    costs = data.draw(costs_of(plan))
    latency = data.draw(st.integers(0, 5))
    program = lower(plan, present, costs)
    timeline = simulate(program, costs, latency)
    assert sorted(timeline.spans) == sorted(longest_paths(program, costs, latency))


def test_waits_and_latency_spelled_out() -> None:
    program = Program((
        (Instruction(Op.FORWARD, FIRST, 0), Instruction(Op.SEND, FIRST, 0, SECOND),
         Instruction(Op.FORWARD, FIRST, 1), Instruction(Op.SEND, FIRST, 1, SECOND)),
        (Instruction(Op.RECV, SECOND, 0, FIRST), Instruction(Op.FORWARD, SECOND, 0),
         Instruction(Op.RECV, SECOND, 1, FIRST), Instruction(Op.FORWARD, SECOND, 1)),
    ))
    timeline = simulate(program, {(FIRST, Op.FORWARD): 2, (SECOND, Op.FORWARD): 10}, latency=1)
    assert set(timeline.spans) == {
        Span(0, "forward", FIRST, 0, 0, 2), Span(0, "forward", FIRST, 1, 2, 4),
        Span(1, "recv", SECOND, 0, 0, 3, FIRST), Span(1, "forward", SECOND, 0, 3, 13),
        Span(1, "forward", SECOND, 1, 13, 23),  # its message had arrived at 5: no wait
    }


def test_collectives_take_no_time() -> None:
    plan = chain(3, 4)
    program = lower(plan, [()] * 4)
    costs = uniform(plan, 1, 2)
    assert simulate(program.with_optimizer_ops(OPTIMIZER_OPS), costs) == simulate(program, costs)


def test_tasks_without_cost_take_no_time() -> None:
    timeline = simulate(lower(chain(2, 2), [(), ()]), {(StageId("llm", 1), Op.BACKWARD): 3})
    assert timeline.makespan == 6 and timeline.busy(0) == 0


def test_deadlock() -> None:
    program = Program((
        (Instruction(Op.RECV, FIRST, 0, SECOND), Instruction(Op.SEND, FIRST, 0, SECOND)),
        (Instruction(Op.RECV, SECOND, 0, FIRST), Instruction(Op.SEND, SECOND, 0, FIRST)),
    ))
    with pytest.raises(InternalError, match="deadlock: rank 0 waits in recv a <- b #0"):
        simulate(program, {})


def test_a_frozen_encoder_runs_ahead_by_four_messages() -> None:
    """Use forwards of 1 and consumers of 10: the fifth message waits for the first receive.

    The first is received immediately; the sixth waits for the second.
    """
    many = range(8)
    program = Program((
        tuple(
            Instruction(op, FIRST, m, SECOND if op is Op.SEND else NO_STAGE)
            for m in many for op in (Op.FORWARD_NO_GRAD, Op.SEND)
        ),
        tuple(
            Instruction(op, SECOND, m, FIRST if op is Op.RECV else NO_STAGE)
            for m in many for op in (Op.RECV, Op.FORWARD)
        ),
    ))
    costs = {(FIRST, Op.FORWARD_NO_GRAD): 1, (SECOND, Op.FORWARD): 10}
    timeline = simulate(program, costs)
    # Received at 1, 11, 21, 31, ...: message 5 is produced at 6, and leaves at 11.
    ends = [span.end for span in timeline.spans if span.op is Op.FORWARD_NO_GRAD]
    assert ends == [1, 2, 3, 4, 5, 6, 12, 22]
    assert timeline.makespan == 81
