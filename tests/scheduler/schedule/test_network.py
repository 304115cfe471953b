"""Messages: their durations, and the simulator compared with an event-driven one."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.costs.devices import Link
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import COMPUTE, Op, Program
from raymm.scheduler.schedule.lower import full_program, lower
from raymm.scheduler.schedule.network import Network, Transfer, delays, edge_transfers
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import StageCost, op_seconds
from tests.scheduler.schedule.test_bounds import chain
from tests.support.random_plans import contents, profiled_plans

FREE = Link(0.0, math.inf)
Edge = tuple[str, str]


def event_by_event(
    program: Program, costs: dict[tuple[str, Op], float], transfers: dict[Edge, Transfer]
) -> float:
    """Return the end of the last compute instruction.

    Ranks and links are machines that handle one thing at a time, and events occur in the order of
    their times.
    """
    events: list[tuple[float, int, str, object]] = []
    count = 0

    def at(when: float, what: str, about: object) -> None:
        nonlocal count
        heapq.heappush(events, (when, count, what, about))
        count += 1

    line: dict[Edge, list[int]] = defaultdict(list)  # messages that wait for their link
    on_the_link: dict[Edge, int | None] = defaultdict(lambda: None)
    inbox: dict[Edge, list[int]] = defaultdict(list)
    blocked: dict[int, Edge] = {}
    position = [0] * len(program.ranks)
    last = 0.0
    for rank in range(len(program.ranks)):
        at(0.0, "rank", rank)

    def start_link(now: float, edge: Edge) -> None:
        if line[edge] and on_the_link[edge] is None:
            on_the_link[edge] = line[edge].pop(0)
            at(now + transfers.get(edge, Transfer()).seconds, "link", edge)

    while events:
        now, _, what, about = heapq.heappop(events)
        if what == "link":  # the link is free again; the message is in flight
            message, on_the_link[about] = on_the_link[about], None
            at(now + transfers.get(about, Transfer()).latency, "message", (about, message))
            start_link(now, about)
        elif what == "message":
            edge, message = about
            inbox[edge].append(message)
            for rank in [r for r, waits in blocked.items() if waits == edge]:
                del blocked[rank]
                at(now, "rank", rank)
        elif position[about] < len(program.ranks[about]):
            instruction = program.ranks[about][position[about]]
            if instruction.op is Op.RECV and not inbox[instruction.edge]:
                blocked[about] = instruction.edge
                continue
            position[about] += 1
            seconds = 0.0
            if instruction.op is Op.RECV:
                assert inbox[instruction.edge].pop(0) == instruction.microbatch
            elif instruction.op is Op.SEND:
                line[instruction.edge].append(instruction.microbatch)
                start_link(now, instruction.edge)
            else:
                seconds = costs[instruction.stage, instruction.op]
                last = max(last, now + seconds)
            at(now + seconds, "rank", about)
    assert position == [len(rank) for rank in program.ranks]
    return last


@given(st.data())
def test_simulated_messages(data: st.DataObject) -> None:
    plan = data.draw(profiled_plans())
    program = lower(plan, data.draw(contents(plan)))
    transfers = {
        edge: Transfer(data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9)))
        for src, dst in plan.stage_edges for edge in ((src, dst), (dst, src))
        if data.draw(st.booleans())
    }
    costs = op_seconds(plan)
    timeline = simulate(program, costs, transfers=transfers)
    assert timeline.makespan == event_by_event(program, costs, transfers)


@given(st.data())
def test_slower_links_never_help_a_program(data: st.DataObject) -> None:
    """Check that every delay can only add time, because a program's order is fixed.

    (Lowering again with other delays may select another order, better or worse.)
    """
    plan = data.draw(profiled_plans())
    program, costs = full_program(plan), op_seconds(plan)

    def makespan(latency: int, bandwidth: float) -> float:
        one = Link(latency, bandwidth)
        return simulate(
            program, costs, transfers=edge_transfers(plan, one, one, 1)
        ).makespan

    times = [makespan(0, math.inf), makespan(0, 4.0), makespan(2, 4.0), makespan(2, 0.5)]
    assert times == sorted(times)
    assert times[0] == simulate(program, costs).makespan
    # With infinite bandwidth a message takes its latency, whatever its size.
    assert makespan(3, math.inf) == simulate(program, costs, latency=3).makespan


@given(profiled_plans(), st.integers(1, 4))
def test_which_link_a_message_takes(plan: Plan, ranks_per_node: int) -> None:
    near, far = Link(1.0, 4.0), Link(100.0, 0.5)
    found = edge_transfers(plan, near, far, ranks_per_node)
    nodes = [
        list(range(first, first + ranks_per_node))
        for first in range(0, plan.num_ranks, ranks_per_node)
    ]
    expected = {}
    for src, dst in plan.stage_edges:
        a, b = plan.by_id[src], plan.by_id[dst]
        if a.rank == b.rank:
            continue
        size = plan.profile.modules[a.module][a.layers[1] - 1].output_bytes
        link = near if any(a.rank in node and b.rank in node for node in nodes) else far
        # A gradient is as large as its tensor.
        for edge in ((src, dst), (dst, src)):
            expected[edge] = (size / link.bandwidth, link.latency)
    assert found == expected
    assert delays(found) == {edge: sum(pair) for edge, pair in expected.items()}
    network = Network(near, far, ranks_per_node)
    assert network.delays(plan) == delays(found)
    assert not any(Network().delays(plan).values())


def test_messages_of_an_edge_queue() -> None:
    plan = chain(2, 3, output_bytes=10)
    # F of the first rank ends at 1 and 2; messages of 5 s each leave its link at 6 and 11.
    transfers = edge_transfers(plan, Link(2.0, 2.0), FREE, 2)
    assert transfers == {
        (StageId("llm", 0), StageId("llm", 1)): Transfer(5.0, 2.0),
        (StageId("llm", 1), StageId("llm", 0)): Transfer(5.0, 2.0),
    }
    spans = simulate(full_program(plan), op_seconds(plan), transfers=transfers).compute()
    starts = [s.start for s in spans if s.rank == 1 and s.op is Op.FORWARD]
    assert starts[:2] == [8, 13]


def test_sizes_may_be_given() -> None:
    plan = replace(chain(2, 3), profile=None)
    sizes = {s.id: StageCost(0, 0, 0, output_bytes=8) for s in plan.stages}
    one = Link(1.0, 4.0)
    assert edge_transfers(plan, one, one, 2, sizes)[
        StageId("llm", 0), StageId("llm", 1)
    ] == Transfer(2.0, 1.0)
    with pytest.raises(ValueError, match="the plan has no cost profile"):
        edge_transfers(plan, one, one, 2)
    with pytest.raises(ValueError, match="ranks_per_node is 0; it must be at least 1"):
        edge_transfers(plan, one, one, 0, sizes)


def test_only_compute_takes_time_on_a_rank() -> None:
    plan = chain(3, 2, output_bytes=1)
    program, costs = full_program(plan), op_seconds(plan)
    slow = Link(0.0, 0.01)
    timeline = simulate(program, costs, transfers=edge_transfers(plan, slow, slow, 3))
    for rank, instructions in enumerate(program):
        work = sum(costs[i.stage, i.op] for i in instructions if i.op in COMPUTE)
        assert timeline.busy(rank) == work
