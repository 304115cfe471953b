"""Temporary memory of a stage, compared with every moment of its backward."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.costs.recomputation import ALL, KEEP, MATMULS, LayerBytes, LayerOption
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.stage import Degrees
from raymm.scheduler.schedule.process_costs import process_layers
from raymm.scheduler.schedule.stage_costs import stage_costs
from raymm.scheduler.search.module_degrees import make_plan

SIZES = st.integers(0, 100)


@st.composite
def layers(draw: st.DrawFn) -> tuple[LayerCost, str]:
    """Draw a layer, and its option for activations."""
    kept = draw(SIZES)
    options = tuple(
        LayerOption(name, 1.0, draw(st.integers(0, kept)), draw(SIZES)) for name in (MATMULS, ALL)
    )
    cost = LayerCost(1.0, 1.0, 1.0, kept, working_bytes=draw(SIZES), options=options)
    return cost, draw(st.sampled_from((KEEP, MATMULS, ALL)))


@given(st.lists(layers(), min_size=1, max_size=6))
def test_the_most_of_all_moments(chosen: list[tuple[LayerCost, str]]) -> None:
    """Check a backward from the last layer to the first.

    At each layer, the kept bytes of the earlier ones exist, and its own temporary bytes.
    """
    costs, names = zip(*chosen, strict=True)
    graph = ModuleGraph((ModuleNode("llm", (True,) * len(costs)),), ())
    plan = make_plan(
        graph, {"llm": ((0, len(costs)),)}, 1, profile=CostProfile({"llm": costs}),
    )
    (stage,) = plan.stages
    stage = replace(stage, layer_options=() if set(names) == {KEEP} else names)
    (of_stage,) = stage_costs(replace(plan, stages=(stage,))).values()
    picked = [
        next(o for o in cost.choices if o.name == name)
        for cost, name in zip(costs, names, strict=True)
    ]
    moments = [
        sum(o.nbytes for o in picked[: at + 1]) + picked[at].working_bytes
        for at in range(len(picked))
    ]
    assert of_stage.activation_bytes == sum(o.nbytes for o in picked)
    assert of_stage.activation_bytes + of_stage.remade_bytes == max(
        *moments, of_stage.activation_bytes
    )


def test_logits_are_freed_before_a_block_is_recomputed() -> None:
    """Check that a recomputed block does not coincide with the logits.

    The last layer keeps 5 of its input and 60 of its head, whose gradient takes 60 more. Its block
    takes 40 when it is recomputed, after the head is done: never 60 and 40.
    """
    cost = LayerCost(
        1.0, 1.0, 1.0, 5 + 30 + 60, working_bytes=60, options=(LayerOption(ALL, 1.0, 65, 60),)
    )
    graph = ModuleGraph((ModuleNode("llm", (True,)),), ())
    plan = make_plan(graph, {"llm": ((0, 1),)}, 1, profile=CostProfile({"llm": (cost,)}))
    stage = replace(plan.stages[0], layer_options=(ALL,))
    (of_stage,) = stage_costs(replace(plan, stages=(stage,))).values()
    assert of_stage.remade_bytes == 60


def test_processes_shard_the_working_memory() -> None:
    options = (LayerOption(ALL, 1.0, 10, 80), LayerOption(MATMULS, 1.0, 20))
    cost = LayerCost(1.0, 1.0, 1.0, 100, working_bytes=40, options=options)
    node = ModuleNode("llm", (True,))
    (shared,) = process_layers(CostProfile({"llm": (cost,)}), node, Degrees(cp=4))
    assert [o.working_bytes for o in shared.options] == [20, None]
    assert shared.working_bytes == 10


@given(SIZES, SIZES, st.sampled_from([1, 2, 4, 8]))
def test_replicated_sizes_follow_from_two_processes(
    whole: int, shared: int, tp: int
) -> None:
    """Measure sizes that are partly replicated and partly sharded."""
    def sizes(of: int) -> tuple[int, ...]:
        return tuple(whole * n + shared * 8 // of for n in (1, 2, 3))

    kept, working, forward = sizes(1)
    half_kept, half_working, half_forward = sizes(2)
    halved = LayerBytes(
        half_kept, half_working, half_forward, (LayerOption(ALL, 0.0, half_kept, half_working),)
    )
    cost = LayerCost(
        1.0, 1.0, 1.0, kept, output_bytes=7, working_bytes=working, forward_bytes=forward,
        options=(LayerOption(ALL, 1.0, kept, working),), halved=halved,
    )
    (of_process,) = process_layers(
        CostProfile({"llm": (cost,)}), ModuleNode("llm", (True,)), Degrees(tp=tp)
    )
    assert sizes(tp) == (
        of_process.activation_bytes, of_process.working_bytes, of_process.forward_bytes
    )
    ((_, _, *of_option),) = of_process.options
    assert tuple(of_option) == sizes(tp)[:2]
