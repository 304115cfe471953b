"""Costs of one of several processes: formulas compared with manual results.

Also memory, and messages between ranks of several processes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.scheduler.context_parallel.traffic import AttentionShape, method_bytes
from raymm.scheduler.costs.devices import Link, Links
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Degrees, StageId
from raymm.scheduler.schedule.bounds import lower_bound
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.memory import check_memory, rank_memory
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedule.process_costs import (
    all_reduce_seconds,
    gather_seconds,
    process_layers,
)
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds, stage_costs
from raymm.scheduler.search.module_degrees import ModuleDegrees, make_plan, with_degrees

NEAR, FAR = Link(1.0, 100.0), Link(10.0, 10.0)
LINKS = Links(NEAR, FAR, 4)
# A hidden state of 400 bytes in fp32; keys and values of 96 bytes.
BLOCK = LayerCost(8.0, 16.0, 8.0, 4000, 1000, 400, 200, 96)
NODE = ModuleNode("llm", (True, True))
GRAPH = ModuleGraph((NODE,), ())


def profile(links: Links | None = LINKS, dtype: str = "fp32", **changes: float) -> CostProfile:
    return CostProfile({"llm": (replace(BLOCK, **changes),) * 2}, dtype=dtype, links=links)


def test_collectives_of_a_ring():
    # Three sends of 25 bytes each, with a latency of one second.
    assert gather_seconds(100, 4, NEAR) == 3 * (1 + 25 / 100)
    assert all_reduce_seconds(100, 4, NEAR) == 6 * (1 + 25 / 100)
    assert all_reduce_seconds(100, 1, NEAR) == all_reduce_seconds(100, 4, None) == 0


def test_groups_take_the_slowest_link_they_need():
    assert LINKS.between(range(4, 8)) is NEAR and LINKS.between([3, 4]) is FAR
    with pytest.raises(PlanError, match="per_node is 0"):
        Links(NEAR, FAR, 0)


@pytest.mark.parametrize(("dtype", "payload"), [("fp32", 400), ("bf16", 200)])
def test_tensor_parallel_layers(dtype, payload):
    """Sum the hidden state twice forward and backward.

    Norm parameters and the residual stream (four hidden states) are replicated.
    """
    first, second = process_layers(profile(dtype=dtype), NODE, Degrees(1, 4), NEAR, NEAR)
    sums = 2 * 6 * (1 + payload / 4 / 100)
    assert first.forward == 8 / 4 + sums and first.backward_input == 16 / 4 + sums
    assert first.backward_weight == 8 / 4
    assert first.activation_bytes == 1600 + 2400 / 4
    assert first.parameter_bytes == 200 + 800 / 4
    assert first.output_bytes == 400
    assert first == second


def test_context_parallel_layers_gather_keys_and_values():
    one = process_layers(profile(), NODE, Degrees(4, 1), NEAR, NEAR)[0]
    # 96 bytes: 12 tokens of one head, of one element each for key and value.
    shape = AttentionShape.even(
        4, 12, 12, query_heads=1, key_heads=1, head_dim=1, activation_bytes=4
    )
    sent = method_bytes(shape, "gather")
    assert sent.forward == (72,) * 4
    assert one.forward == pytest.approx(8 / 4 + 3 * 1 + sent.forward[0] / 100)
    assert one.backward_input == pytest.approx(16 / 4 + 3 * 1 + sent.backward[0] / 100)
    assert one.activation_bytes == 1000 and one.parameter_bytes == 1000


def test_unknown_keys_and_values_equal_the_queries():
    one = process_layers(profile(key_value_bytes=0), NODE, Degrees(2, 1), NEAR, NEAR)[0]
    assert one.forward == 8 / 2 + 1 + 800 / 2 / 100


def test_a_projector_has_no_attention_and_one_sum():
    node = ModuleNode("vision", (False, True), projector=True)
    costs = CostProfile({"vision": (BLOCK,) * 2}, links=LINKS)
    block, projector = process_layers(costs, node, Degrees(2, 2), NEAR, NEAR)
    # A process sums its share of the tokens.
    assert projector.forward == 8 / 4 + 2 * (1 + 200 / 2 / 100)
    assert block.forward == 8 / 4 + 2 * 2 * (1 + 200 / 2 / 100) + 1 + 96 / 2 / 2 / 100


@given(
    st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.sampled_from(["none", "zero1"])
)
def test_state_of_a_process(tp, cp, dp, sharding):
    """Shard weight, gradient and two moments: all by tp, the moments by dp and cp with ZeRO-1."""
    tp, cp, dp = 2**tp, 2**cp, 2**dp
    costs = profile(None, replicated_bytes=0, parameter_bytes=4096)
    plan = with_degrees(
        make_plan(GRAPH, {"llm": ((0, 2),)}, 8, profile=costs),
        {"llm": ModuleDegrees(dp, cp, tp, sharding)},
    )
    held = 2 * 4096 // tp
    moments = dp * cp if sharding == "zero1" else 1
    assert {c.state_bytes for c in stage_costs(plan).values()} == {2 * held + 2 * held // moments}
    assert plan.num_processes == tp * cp * dp
    assert Plan.from_json(plan.to_json()) == plan


def test_gradients_are_summed_once_after_the_last_backward():
    """Use two distant replicas: 2000 bytes at 10 bytes a second each way, after 24 + 24 seconds."""
    plan = with_degrees(
        make_plan(GRAPH, {"llm": ((0, 2),)}, 8, profile=replace(profile(), links=None)),
        {"llm": ModuleDegrees(2)},
    )
    alone = stage_costs(plan)[StageId("llm", 0)]
    far = replace(plan, profile=profile(Links(NEAR, FAR, 1)))
    summed = stage_costs(far)[StageId("llm", 0)]
    reduction = 2 * (10 + 2000 / 2 / 10)
    # The first layer has no predecessor: no gradient of its input.
    backward = 16 + 2 * 8
    assert summed.backward_weight == pytest.approx(
        alone.backward_weight + (reduction - backward) / 4
    )
    near = stage_costs(replace(plan, profile=profile(Links(NEAR, FAR, 2))))[StageId("llm", 0)]
    assert near == alone  # 22 seconds are hidden
    frozen = ModuleGraph((ModuleNode("llm", (False, False)),), ())
    assert stage_costs(replace(far, graph=frozen))[StageId("llm", 0)].backward_weight == 0


def two_modules(consumer: ModuleDegrees, producer: ModuleDegrees, per_node: int) -> Plan:
    graph = ModuleGraph((ModuleNode("vision", (True,)), NODE), (("vision", "llm"),))
    costs = CostProfile(
        {"vision": (BLOCK,), "llm": (BLOCK,) * 2}, links=replace(LINKS, per_node=per_node)
    )
    plan = make_plan(graph, {"vision": ((0, 1),), "llm": ((0, 1), (1, 2))}, 2, profile=costs)
    return with_degrees(plan, {"llm": consumer, "vision": producer})


def test_messages_use_the_links_of_the_smaller_end():
    plan = two_modules(ModuleDegrees(cp=2, tp=2), ModuleDegrees(cp=2), 4)
    # llm.0 has processes 0-3, llm.1 4-7, vision 8 and 9: three nodes.
    assert [plan.rank_processes(rank) for rank in range(3)] == [range(4), range(4, 8), range(8, 10)]
    found = Network(NEAR, FAR, 4).transfers(plan)
    out, back = (
        found[StageId("vision", 0), StageId("llm", 0)],
        found[StageId("llm", 0), StageId("vision", 0)],
    )
    assert out.seconds == back.seconds == 400 / 2 / 10
    # Two encoders gather their tokens, four receivers their shares; for the gradient the four
    # reduce-scatter their parts, and the two gather it.
    assert out.latency == 10 + (1 + 400 / 2 / 100) + 3 * (1 + 400 / 4 / 100)
    assert back.latency == 10 + 3 * (1 + 400 / 4 / 100) + (1 + 400 / 2 / 100)
    # Within the module tokens stay where they are: four links, and halves of 200 bytes.
    along = found[StageId("llm", 0), StageId("llm", 1)]
    assert along.seconds == 400 / 4 / 10 and along.latency == 10 + (1 + 200 / 2 / 100)


def test_tensor_parallel_groups_begin_where_nodes_do():
    plan = two_modules(ModuleDegrees(dp=2, tp=4), ModuleDegrees(), 4)
    for stage in plan.module_stages("llm"):
        numbers = plan.rank_processes(stage.rank)
        assert numbers[0] // 4 == numbers[-1] // 4
    # Replicas of a stage are adjacent.
    assert [s.id for r in range(5) for s in plan.rank_stages(r)] == [
        StageId("llm", 0),
        StageId("llm", 0, 1),
        StageId("llm", 1),
        StageId("llm", 1, 1),
        StageId("vision", 0),
    ]


DEGREES = st.sampled_from([
    ModuleDegrees(), ModuleDegrees(2), ModuleDegrees(1, 2), ModuleDegrees(1, 1, 2),
    ModuleDegrees(2, 2, 2, "zero1"), ModuleDegrees(1, 2, 4),
])


@given(DEGREES, DEGREES, st.sampled_from([1, 2, 4, 100]), st.sampled_from(["1f1b", "zero_bubble"]))
def test_simulation_bounds_and_memory_agree(consumer, producer, per_node, schedule):
    plan = replace(two_modules(consumer, producer, per_node), schedule=schedule)
    network = Network(NEAR, FAR, per_node)
    program, transfers = full_program(plan), network.transfers(plan)
    seconds = simulate(
        program, op_seconds(plan), transfers=transfers, posted=plan.posted_receives
    ).makespan
    assert seconds >= lower_bound(plan, network.delays(plan)) * (1 - 1e-9)
    most = max(need.total for need in rank_memory(plan, program))
    check_memory(replace(plan, memory_limit=most), program)
    with pytest.raises(PlanError, match=f"memory_limit is {most - 1:,}") as refused:
        check_memory(replace(plan, memory_limit=most - 1), program)
    if plan.num_processes > plan.num_ranks and "llm" in str(refused.value):
        width = consumer.cp * consumer.tp
        assert (f"each of its {width} processes" in str(refused.value)) == (width > 1)


def test_old_profiles_without_links_and_keys():
    data = profile().to_dict()
    assert CostProfile.from_dict(data) == profile()
    del data["links"]
    for layer in (layers := [dict(one) for one in data["modules"]["llm"]]):
        del layer["replicated_bytes"], layer["key_value_bytes"]
    old = CostProfile.from_dict({**data, "modules": {"llm": layers}})
    assert old.links is None and old.modules["llm"][0].key_value_bytes == 0
    broken = profile().to_dict()
    broken["links"]["per_node"] = 0
    with pytest.raises(PlanError, match="links: per_node is 0"):
        CostProfile.from_dict(broken)
    with pytest.raises(PlanError, match="replicated_bytes is 1001"):
        replace(BLOCK, replicated_bytes=1001)


@pytest.mark.parametrize(("dtype", "whole"), [("fp32", 4096), ("bf16", 2048)])
def test_fully_sharded_layers_are_gathered_one_by_one(dtype, whole):
    """Check that it is not kept in addition, unlike replicated weights."""
    costs = replace(
        profile(None, replicated_bytes=0, parameter_bytes=4096), dtype=dtype, links=None
    )
    plan = make_plan(GRAPH, {"llm": ((0, 2),)}, 8, profile=costs)
    stages = tuple(replace(stage, sharding="fsdp", fsdp=4) for stage in plan.stages)
    (cost,) = stage_costs(replace(plan, stages=stages)).values()
    assert cost.state_bytes == 4 * 2 * 4096 // 4 + whole


def test_sharded_experts_exchange_tokens():
    """Use layers of 1000 bytes with 600 bytes of experts, and 960 bytes of exchanged tokens."""
    def cost(sent=960, **fields):
        costs = profile(replicated_bytes=0, expert_bytes=600, exchange_bytes=sent)
        plan = make_plan(GRAPH, {"llm": ((0, 2),)}, 8, profile=costs)
        stages = tuple(replace(s, sharding="fsdp", fsdp=4, **fields) for s in plan.stages)
        assert Plan.from_json(replace(plan, stages=stages).to_json()).stages == stages
        (one,) = stage_costs(replace(plan, stages=stages)).values()
        return one

    # A process sends 240 bytes, half of them there and half back: 30 to each of the three others.
    exchange = 2 * 3 * (1 + 30 / 100)
    gathered, apart = cost(), cost(ep=4)
    assert gathered.forward == max(2 * 8 / 4, 3 * (1 + 2000 / 4 / 100))
    assert apart.forward == pytest.approx(max(2 * 8 / 4, 3 * (1 + 800 / 4 / 100)) + 2 * exchange)
    backward_weight = max(2 * 8 / 4, 2 * 3 * (1 + 800 / 4 / 100) - 16 / 4)
    assert apart.backward_weight == pytest.approx(backward_weight + 2 * exchange)
    # One layer at a time is gathered, except for its experts.
    assert gathered.state_bytes - apart.state_bytes == 600
    # Tokens of a recomputed layer are exchanged again.
    again, nothing = (cost(sent, ep=4, layer_options=("all", "all")) for sent in (960, 0))
    assert again.backward_weight - nothing.backward_weight == pytest.approx(4 * exchange)
