"""Processes of a rank are on one node if possible."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.scheduler.costs.devices import Link, Links
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.rank_nodes import on_nodes, rank_nodes, straddling
from raymm.scheduler.plan.stage import Degrees, Stage
from raymm.scheduler.schedule.stage_costs import stage_costs


def least_straddling(widths: tuple[int, ...], rooms: tuple[int, ...]) -> int:
    """Return the fewest ranks that are not on one node, by trying all assignments."""
    best = len(widths)
    for choice in itertools.product(range(-1, len(rooms)), repeat=len(widths)):
        filled = [
            sum(w for w, node in zip(widths, choice, strict=True) if node == number)
            for number in range(len(rooms))
        ]
        if all(f <= room for f, room in zip(filled, rooms, strict=True)):
            best = min(best, choice.count(-1))
    return best


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_no_rank_spans_nodes_unnecessarily(data):
    """Compare with all assignments, if degrees are powers of two."""
    power = st.sampled_from([1, 2, 4])
    ranks = [
        Degrees(data.draw(power), data.draw(power), data.draw(st.sampled_from([1, 2])))
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    processes = sum(map(prod, ranks))
    nodes = data.draw(st.lists(
        st.sampled_from("abc"), min_size=processes, max_size=processes + 3
    ))
    placed = rank_nodes(ranks, nodes)
    assert len(set(placed.places)) == processes == len(placed.places)
    assert set(placed.places) <= set(range(len(nodes)))
    by_name = [nodes[place] for place in placed.places]
    assert len(set(zip(by_name, placed.nodes, strict=True))) == len(set(by_name))
    starts = list(itertools.accumulate(map(prod, ranks), initial=0))
    astride = [
        len(set(placed.nodes[first:last])) > 1 for first, last in itertools.pairwise(starts)
    ]
    rooms = tuple(nodes.count(node) for node in "abc")
    if not least_straddling(tuple(map(prod, ranks)), rooms):
        assert not any(astride)


def test_tensor_groups_stay_on_one_node():
    # Eight processes on three nodes of 4, 3 and 2 slots: tp 2 lies within nodes.
    placed = rank_nodes([Degrees(cp=4, tp=2)], list("aaaabbbcc"))
    assert placed.nodes[0] == placed.nodes[1] and placed.nodes[2] == placed.nodes[3]
    assert placed.nodes[4] == placed.nodes[5] and placed.nodes[6] == placed.nodes[7]


def test_mixed_placements_are_sorted_by_node():
    placed = rank_nodes([Degrees(tp=2)] * 3, list("abcabc"))
    assert placed.nodes == (0, 0, 1, 1, 2, 2)
    assert placed.places == (0, 3, 1, 4, 2, 5)


def test_costs_are_those_of_the_actual_nodes():
    """Use two ranks of two processes, one of them on two nodes."""
    layer = LayerCost(1.0, 1.0, 1.0, 100, 100, 100)
    near, far = Link(0.0, 1e3), Link(1.0, 1e2)
    profile = CostProfile({"llm": (layer,) * 2}, links=Links(near, far, 4))
    stages = tuple(Stage("llm", i, (i, i + 1), i, tp=2) for i in range(2))
    plan = Plan(ModuleGraph((ModuleNode("llm", (True,) * 2),), ()), stages, 4, profile=profile)
    assert on_nodes(plan, [0, 0, 0, 0]).to_dict() != plan.to_dict()
    assert stage_costs(on_nodes(plan, [0, 0, 0, 0])) == stage_costs(plan)
    placed = on_nodes(plan, [0, 1, 1, 1])
    assert Plan.from_json(placed.to_json()) == placed
    first, second = stage_costs(placed).values()
    assert first.forward > second.forward == next(iter(stage_costs(plan).values())).forward
    bare = replace(plan, profile=None)
    assert on_nodes(bare, [0, 1, 1, 1]) is bare


def test_ranks_that_span_nodes_are_reported():
    stages = tuple(Stage("llm", i, (i, i + 1), i, tp=2, cp=2) for i in range(6))
    plan = Plan(ModuleGraph((ModuleNode("llm", (True,) * 6),), ()), stages, 4)
    assert straddling(plan, [p // 4 for p in range(24)]) is None
    text = straddling(plan, [p // 2 for p in range(24)])
    assert text is not None and text.startswith(
        "process groups span nodes and use slower links: rank 0 (llm.0; cp 2) has processes on "
        "2 nodes; rank 1"
    )
    assert text.endswith("; and 2 more")
    text = straddling(plan, [0] * 3 + [1] * 21)
    assert text is not None and "rank 0 (llm.0; tp 2, cp 2) has processes on 2 nodes" in text
