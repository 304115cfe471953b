"""Columns and bits of a step's arrays are those of the plan's stages."""

from __future__ import annotations

from hypothesis import given

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.compiled import arrays as a
from raymm.scheduler.schedule.step_graph import active_stages
from raymm.scheduler.schedule.step_parts import OPS, parts_of
from tests.support.random_plans import profiled_plans, steps


def test_numbers_of_operations_are_those_of_the_steps():
    named = {
        a.F: Op.FORWARD, a.F_NO_GRAD: Op.FORWARD_NO_GRAD,
        a.F_CHECKPOINTED: Op.FORWARD_CHECKPOINTED, a.R: Op.RECOMPUTE, a.B: Op.BACKWARD,
        a.B_INPUT: Op.BACKWARD_INPUT, a.B_WEIGHT: Op.BACKWARD_WEIGHT,
    }
    assert OPS == tuple(named[number] for number in range(len(OPS)))


@given(steps(profiled_plans()))
def test_lists_and_columns_are_those_of_the_plan(step: tuple[Plan, list[set[str]]]) -> None:
    plan, present = step
    active = active_stages(plan, present)
    modules = [node.name for node in plan.graph.nodes]
    for part in parts_of(plan, active, {}, {}, {}, {}):
        table, uses = part.arrays.stages, part.arrays.uses
        ids = [stage.id for stage in part.stages]
        for row, stage in enumerate(part.stages):
            assert part.ranks[table[row, a.RANK]] == stage.rank
            assert modules[table[row, a.MODULE]] == stage.module
            assert table[row, a.DEPTH] == plan.depth[stage.id]
            assert table[row, a.HELD] == plan.warm_up[stage.id]
            assert bool(table[row, a.RECOMPUTES]) == stage.recompute
            assert bool(table[row, a.TRAINS]) == plan.trainable(stage)
            for column, number in enumerate(part.microbatches):
                bits, one = uses[row, column], active[number]
                assert bool(bits & a.RUN) == (stage.id in one.stages)
                assert bool(bits & a.NEEDS) == (stage.id in one.needs_backward)
                assert bool(bits & a.OWES) == (stage.id in one.needs_input_grad)
            for offset, bit in ((a.FORWARDS, a.RUN), (a.BACKWARDS, a.NEEDS)):
                listed = part.arrays.microbatches[table[row, offset] : table[row + 1, offset]]
                assert listed.tolist() == [
                    n for n in range(len(part.microbatches)) if uses[row, n] & bit
                ]
            producers = part.arrays.edges[
                table[row, a.PRODUCERS] : table[row + 1, a.PRODUCERS], a.PRODUCER
            ]
            assert [ids[p] for p in producers] == list(plan.stage_producers[stage.id])
            consumers = part.arrays.edges[table[row, a.CONSUMERS] : table[row + 1, a.CONSUMERS]]
            assert {ids[c] for c in consumers[:, a.CONSUMER]} == set(plan.stage_consumers[stage.id])
            for consumer, edge in consumers[:, [a.CONSUMER, a.CONSUMER_EDGE]]:
                assert part.edges[edge] == (stage.id, ids[consumer])
