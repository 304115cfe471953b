"""Equal part of a plan: costs, messages and seconds are those of the whole plan."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.scheduler.costs.devices import Link
from raymm.scheduler.plan.equal_part import EqualPart
from raymm.scheduler.schedule.lower import forecast
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedule.stage_costs import stage_costs
from raymm.scheduler.search.module_degrees import ModuleDegrees
from raymm.scheduler.search.stage_space import StageSpace
from tests.support.random_models import models


@settings(max_examples=40, deadline=None)
@given(st.data(), models(most_encoders=2, llm_layers=4))
def test_an_equal_part_has_the_whole_plans_costs(data, model):
    graph, profile = model
    network = Network(Link(1e-3, 1e3), Link(1e-2, 1e2), data.draw(st.sampled_from([2, 3, 4])))
    profile = replace(profile, links=network.links)
    parts = data.draw(st.sampled_from([2, 4]))
    few = st.sampled_from([1, 2])
    degrees = {
        node.name: ModuleDegrees(
            parts * data.draw(few), data.draw(few), data.draw(few),
            data.draw(st.sampled_from(["none", "zero1"])),
        )
        for node in graph.nodes
    }
    counts = {
        node.name: data.draw(st.integers(1, min(2, node.num_layers))) for node in graph.nodes
    }
    space = StageSpace(
        graph, profile, 200, 16, data.draw(st.sampled_from(["1f1b", "zero_bubble"])),
        degrees=degrees, recompute=data.draw(st.booleans()),
    )
    plan = space.plan(counts)
    part = replace(space, by_part=True).plan(counts)
    assert isinstance(part, EqualPart) and part.parts % parts == 0
    parts = part.parts
    assert part.whole() == plan and type(part.whole()) is type(plan)
    assert replace(part, schedule="gpipe").whole() == replace(plan, schedule="gpipe")

    def in_whole(stage):
        return stage._replace(replica=stage.replica * parts)

    costs, transfers = stage_costs(plan), network.transfers(plan)
    assert stage_costs(part) == {stage: costs[in_whole(stage)] for stage in part.by_id}
    assert network.transfers(part) == {
        (src, dst): transfers[in_whole(src), in_whole(dst)]
        for src, dst in network.transfers(part)
    }
    # A plan takes as long as its slowest part.
    near = Network(network.within_node, network.within_node, network.ranks_per_node)
    alike = replace(profile, links=near.links)
    part, plan = replace(part, profile=alike), replace(plan, profile=alike)
    whole = forecast(plan, near.transfers(plan))
    own = forecast(part, near.transfers(part))
    assert whole.seconds == own.seconds
    assert set(whole.activation_peaks) == set(own.activation_peaks)
