"""Cost profiles as files, and the frozen rules compared with a layer-by-layer backward."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.pipelines import unaware_work
from raymm.errors import PlanError
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost, layer_work, trainable_before
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.stage_costs import op_seconds, stage_costs
from tests.support.random_plans import plans


def profile_of(graph: ModuleGraph, draw) -> CostProfile:
    numbers = st.integers(0, 9)
    return CostProfile({
        node.name: tuple(
            LayerCost(*(draw(numbers) for _ in range(6))) for _ in range(node.num_layers)
        )
        for node in graph.nodes
    })


def needs_gradient(graph: ModuleGraph) -> dict[tuple[str, int], tuple[bool, bool]]:
    """Return per layer (needs the gradient of its input, has any backward), as in autograd.

    A tensor requires grad if any of its sources is trainable.
    """
    result = {}
    output = {}
    for name in graph.topological:
        tensor = any(output[producer] for producer in graph.producers(name))
        for index, trainable in enumerate(graph.node(name).trainable):
            before, tensor = tensor, tensor or trainable
            result[name, index] = (before, tensor)
        output[name] = tensor
    return result


@given(st.data())
def test_frozen_rules(data: st.DataObject) -> None:
    plan = data.draw(plans())
    profile = profile_of(plan.graph, data.draw)
    expected = needs_gradient(plan.graph)
    for recompute in (False, True):
        work = layer_work(plan.graph, profile, recompute)
        for (name, index), (input_gradient, backward) in expected.items():
            cost, found = profile.modules[name][index], work[name][index]
            assert found.forward == cost.forward
            assert found.recompute == (cost.forward if recompute and backward else 0)
            assert found.backward_input == (cost.backward_input if input_gradient else 0)
            trains = plan.graph.node(name).trainable[index]
            assert found.backward_weight == (cost.backward_weight if trains else 0)
            assert found.total == (
                found.forward + found.recompute + found.backward_input + found.backward_weight
            )
    # Stages are sums of their layers.
    sums, seconds = stage_costs(plan, profile), op_seconds(plan, profile)
    work = layer_work(plan.graph, profile)
    for stage in plan.stages:
        part = work[stage.module][slice(*stage.layers)]
        assert sums[stage.id].forward == sum(w.forward for w in part)
        assert sums[stage.id].backward_input == sum(w.backward_input for w in part)
        assert sums[stage.id].backward_weight == sum(w.backward_weight for w in part)
        assert seconds[stage.id, Op.BACKWARD] == sum(w.backward for w in part)


def test_alignment_spelled_out() -> None:
    """Freeze encoder and LLM, and train the projector (Cornstarch v1 §4.2)."""
    graph = ModuleGraph(
        (ModuleNode("vision", (False, False, True), projector=True), ModuleNode("llm", (False,))),
        (("vision", "llm"),),
    )
    profile = CostProfile({"vision": (LayerCost(1, 2, 3),) * 3, "llm": (LayerCost(4, 5, 6),)})
    work = layer_work(graph, profile, recompute=True)
    assert [w.backward for w in work["vision"]] == [0, 0, 3]
    assert [w.recompute for w in work["vision"]] == [0, 0, 1]
    assert (work["llm"][0].recompute, work["llm"][0].backward_input) == (4, 5)
    assert work["llm"][0].backward_weight == 0
    assert trainable_before(graph, ["llm"]) == {"vision": (False,) * 3, "llm": (False,)}
    assert [w.backward for w in unaware_work(graph, profile)["vision"]] == [5, 5, 5]


def test_bytes() -> None:
    graph = ModuleGraph(
        (ModuleNode("vision", (False, True)), ModuleNode("llm", (False, True))),
        (("vision", "llm"),),
    )
    layer = LayerCost(1, 1, 1, activation_bytes=100, parameter_bytes=40, output_bytes=7)
    profile = CostProfile({"vision": (layer,) * 2, "llm": (layer,) * 2}, dtype="bf16")
    stages = (
        Stage("vision", 0, (0, 2), 0), Stage("llm", 0, (0, 1), 1), Stage("llm", 1, (1, 2), 2)
    )
    costs = stage_costs(Plan(graph, stages, 1), profile)
    # Frozen weights in bf16; trainable ones in fp32 with gradient and two moments, and in bf16.
    assert [costs[s.id].state_bytes for s in stages] == [20 + 180, 20, 180]
    # With the output, where the backward begins.
    assert [costs[s.id].activation_bytes for s in stages] == [107, 107, 100]
    assert [costs[s.id].input_bytes for s in stages] == [0, 7, 7]


@given(st.data())
def test_json_round_trip(data: st.DataObject) -> None:
    plan = data.draw(plans())
    profile = profile_of(plan.graph, data.draw)
    assert CostProfile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(("change", "message"), [
    (lambda d: d.update(format=9), "format is 9; accepted: 1"),
    (lambda d: d.pop("modules"), "lacks the key 'modules'"),
    (lambda d: d.update(gpu="A40"), "wrong key or value"),
    (lambda d: d.update(dtype="fp8"), "dtype is 'fp8'; accepted: fp32, bf16"),
    (lambda d: d["modules"]["llm"][0].update(forward=-1), "forward is -1; it must be at least 0"),
    (lambda d: d["modules"]["llm"][0].update(forward="1"), "wrong key or value"),
    (lambda d: d["modules"]["llm"][0].update(forward=float("nan")), "forward is nan"),
    (lambda d: d["modules"]["llm"][0].update(forward=float("inf")), "forward is inf; .* finite"),
    (lambda d: d["modules"]["llm"][0].pop("forward"), "wrong key or value"),
    (lambda d: d["modules"].update(llm=3), "wrong key or value"),
])
def test_malformed_files_are_refused(change, message: str) -> None:
    data = json.loads(CostProfile({"llm": (LayerCost(1, 1, 1),)}).to_json())
    change(data)
    with pytest.raises(PlanError, match=message):
        CostProfile.from_dict(data)


def test_not_json() -> None:
    with pytest.raises(PlanError, match="the profile is not JSON"):
        CostProfile.from_json("{")


def test_of_another_model() -> None:
    graph = ModuleGraph((ModuleNode("llm", (True, True)),), ())
    with pytest.raises(PlanError, match="the profile of 'llm' has 1 layer, the module 2"):
        CostProfile({"llm": (LayerCost(1, 1, 1),)}).check(graph)
    with pytest.raises(PlanError, match="the profile lacks module 'llm'"):
        CostProfile({"lm": (LayerCost(1, 1, 1),)}).check(graph)
