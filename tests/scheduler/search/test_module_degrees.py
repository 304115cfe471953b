"""Degrees of modules, and plans that are made with them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.scheduler.costs.layer_costs import has_backward
from raymm.scheduler.plan.stage import Degrees
from raymm.scheduler.search.module_degrees import (
    ALONE,
    DegreeChoices,
    ModuleDegrees,
    common_replicas,
    degrees_of,
    make_plan,
    rank_text,
    recomputing,
    with_degrees,
)
from tests.support.random_plans import plans

SMALL = st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3, unique=True)
DEGREES = st.builds(ModuleDegrees, *[st.sampled_from([1, 2, 4])] * 3, st.just("none"))


@given(SMALL, SMALL, SMALL, st.integers(1, 16), st.sampled_from([1, 4, 8]), st.integers(1, 8))
def test_degrees_within_devices_equal_a_filter(tp, cp, dp, devices, per_node, microbatches):
    choices = DegreeChoices(tuple(tp), tuple(cp), tuple(dp))
    found = list(choices.within(devices, per_node, microbatches, "zero1"))
    expected = [
        ModuleDegrees(d, c, t, "zero1" if d * c > 1 else "none")
        for t, c, d in itertools.product(tp, cp, dp)
        if per_node % t == 0 and d * c * t <= devices and microbatches % d == 0
    ]
    assert found == expected
    assert choices.may_be_alone == all(1 in values for values in (tp, cp, dp))


@pytest.mark.parametrize("values", [(), (0,), (1.5,), (True,)])
def test_choices_that_are_no_degrees_are_rejected(values):
    with pytest.raises(PlanError, match="cp is .*whole numbers, each at least 1"):
        DegreeChoices(cp=values)


def partitions_of(plan) -> dict:
    return {
        node.name: tuple(s.layers for s in plan.replicas(node.name)[0]) for node in plan.graph.nodes
    }


@given(plans(), st.booleans(), st.booleans())
def test_a_made_plan_has_a_rank_per_stage(plan, recompute, recompute_loss):
    graph = plan.graph
    made = make_plan(
        graph, partitions_of(plan), 3, recompute=recompute, recompute_loss=recompute_loss
    )
    assert made.num_ranks == len(made.stages) and partitions_of(made) == partitions_of(plan)
    backward, tables = has_backward(graph), recomputing(graph, recompute, recompute_loss)
    for stage in made.stages:
        lo, hi = stage.layers
        computes_loss = stage.module in graph.losses and hi == graph.node(stage.module).num_layers
        again = recompute and all(backward[stage.module][lo:hi])
        again = again and (recompute_loss or not computes_loss)
        assert stage.recompute == again == tables[stage.module][lo, hi]


@given(plans(), st.data())
def test_degrees_give_every_stage_its_replicas_and_processes(plan, data):
    plain = make_plan(plan.graph, partitions_of(plan), 8)
    degrees = {node.name: data.draw(DEGREES) for node in plan.graph.nodes}
    made = with_degrees(plain, degrees)
    for node in plan.graph.nodes:
        assert degrees_of(made, node.name) == degrees[node.name]
        for index, stage in enumerate(plain.replicas(node.name)[0]):
            own = [replica[index] for replica in made.replicas(node.name)]
            ranks = [replica.rank for replica in own]
            assert ranks == list(range(ranks[0], ranks[0] + len(own)))  # adjacent
            assert {replica.layers for replica in own} == {stage.layers}
    widths = [made.processes(rank) for rank in range(made.num_ranks)]
    assert widths == sorted(widths, reverse=True)
    assert made.num_processes == sum(
        own.devices * len(plain.replicas(name)[0]) for name, own in degrees.items()
    )
    parts = common_replicas(plan.graph, degrees)
    part = with_degrees(plain, degrees, parts)
    if parts > 1:
        assert part.parts == parts and len(part.stages) * parts == len(made.stages)
    assert with_degrees(plain, {}) is plain


def test_texts_name_degrees_above_one():
    assert ModuleDegrees(2, 1, 4).text == "tp 4, dp 2" and ALONE.text == ""
    assert rank_text(Degrees(cp=2, tp=4)) == "tp 4, cp 2"
    assert ModuleDegrees(2, 3, 4).of_rank == Degrees(3, 4) and ModuleDegrees(2, 3, 4).devices == 24
