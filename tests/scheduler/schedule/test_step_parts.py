"""Parts of a step are what edges and ranks connect, and hold the costs of their stages."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.network import Transfer
from raymm.scheduler.schedule.stage_costs import op_seconds, stage_costs
from raymm.scheduler.schedule.step_graph import active_stages, full_step
from raymm.scheduler.schedule.step_parts import OPS, SHORTEST, Part, loaded, parts_of
from tests.support.random_plans import profiled_plans


def parts_with_costs(plan: Plan, loads=None) -> list[Part]:
    active = active_stages(plan, full_step(plan))
    return parts_of(plan, active, op_seconds(plan), stage_costs(plan), {}, loads or {})


@given(profiled_plans())
def test_parts_are_connected_and_complete(plan: Plan) -> None:
    parts = parts_with_costs(plan)
    part_of = {stage.id: n for n, part in enumerate(parts) for stage in part.stages}
    assert len(part_of) == len(plan.stages) == sum(len(part.stages) for part in parts)
    assert part_of[plan.stages[0].id] == 0
    for src, dst in plan.stage_edges:
        assert part_of[src] == part_of[dst]
    assert sorted(rank for part in parts for rank in part.ranks) == list(range(plan.num_ranks))
    for part in parts:  # flooding from one stage reaches all of them
        reached, grown = set(), {part.stages[0].id}
        while grown - reached:
            reached |= grown
            ranks = {plan.by_id[stage].rank for stage in reached}
            grown = {
                s.id for s in part.stages
                if s.rank in ranks or reached & set(plan.stage_producers[s.id])
                or reached & set(plan.stage_consumers[s.id])
            }
        assert reached == {stage.id for stage in part.stages}


@given(profiled_plans())
def test_seconds_and_transfers_are_those_of_the_plan(plan: Plan) -> None:
    costs = op_seconds(plan)
    transfers = {edge: Transfer(n, n + 0.5) for n, edge in enumerate(plan.stage_edges)}
    for part in parts_with_costs(plan):
        table = part.op_array(costs)
        for row, stage in enumerate(part.stages):
            for column, op in enumerate(OPS):
                assert table[row, column] == costs.get((stage.id, op), 0.0)
                if (stage.id, op) in costs:
                    assert part.arrays.amounts[row, column] == max(costs[stage.id, op], SHORTEST)
        seconds, latency = part.transfer_arrays(transfers)
        assert seconds[0].tolist() == [transfers[edge].seconds for edge in part.edges]
        assert latency[0].tolist() == [transfers[edge].latency for edge in part.edges]
        assert not seconds[1].any() and not latency[1].any()  # no gradients in the table


@given(profiled_plans(), st.data())
def test_loads_are_by_module_and_microbatch(plan: Plan, data) -> None:
    module = data.draw(st.sampled_from([node.name for node in plan.graph.nodes]))
    load = np.arange(plan.num_microbatches) + 2.0
    for part, plain in zip(
        parts_with_costs(plan, {module: load}), parts_with_costs(plan), strict=True
    ):
        expected = [
            load[list(part.microbatches)] if s.module == module else np.ones(len(part.microbatches))
            for s in part.stages
        ]
        assert np.array_equal(part.arrays.loads, np.array(expected))
        assert np.array_equal(loaded(plain, {module: load}).arrays.loads, part.arrays.loads)
        assert (plain.arrays.loads == 1).all()
