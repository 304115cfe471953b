"""Predicted bytes of every edge equal the sent bytes, including gradients and ports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.shared.sent_messages import message_rows, planned_bytes, sent_bytes
from raymm.actors.modules.merge import CrossAttend
from raymm.actors.rank.rank_resources import RankResources
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec, dag_plan
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.plan.plan import Plan
from tests.parity.test_cross_attention import model_of
from tests.parity.test_ports import WIDTH, deep_batch, deep_stack
from tests.support import parity_models as pm

pytestmark = pytest.mark.usefixtures("ray_cluster")

ELEMENT = 4


def with_bytes(plan: Plan, outputs: dict[str, int], ports: dict[str, dict[str, int]]) -> Plan:
    """Return the plan with bytes of each module's layer outputs, and of ports."""
    costs = {
        node.name: tuple(
            LayerCost(1.0, 1.0, 1.0, output_bytes=outputs[node.name]) for _ in node.trainable
        )
        for node in plan.graph.nodes
    }
    return replace(plan, profile=CostProfile(costs, ports=ports))


def test_bytes_of_every_kind_of_model():
    """Include tower features that a language model's later stages read."""
    for row in message_rows():
        assert row["planned"] == row["sent"] > 0, row


def test_bytes_of_features_for_several_layers():
    dag, rows, microbatches = deep_stack(), 4, 3
    plan = dag_plan(dag, {"llm": ParallelSpec(pp=3, layers=(1, 1, 2))}, microbatches)
    own = rows * WIDTH * ELEMENT
    ports = {port.name: own for port in plan.graph.ports}
    plan = with_bytes(plan, {"vision": 4 * own, "llm": own, "distance": 0}, {"llm": ports})
    due = planned_bytes(plan, microbatches)
    # Features of layer 0 go to stage 0, of layer 1 and the last to stage 1, of layer 2 to stage 2,
    # which gets the last ones from stage 1: five tensors, two hidden states, and the output.
    assert sum(due.values()) == 2 * microbatches * own * (5 + 2 + 1)
    with ParallelModel(dag, plan, timeout_s=120) as running:
        running.execute([deep_batch(rows, m) for m in range(microbatches)])
        assert sent_bytes(running) == due


@pytest.mark.cells(1)
@pytest.mark.parametrize("cp", [1, 2])
def test_bytes_of_states_for_cross_attention(cp):
    """Sum all processes of a rank; tokens divide evenly."""
    model, rows, tokens, microbatches = model_of(CrossAttend()), 2, 16, 2
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=3, cp=cp, layers=(2, 1, 5)), microbatches)
    hidden, states = rows * tokens * 32 * ELEMENT, rows * 4 * 32 * ELEMENT
    plan = with_bytes(spec.plan(model), {"vision": states, "llm": hidden}, {})
    due = planned_bytes(plan, microbatches)
    of_stages = {(src.index, dst.index) for src, dst in due if src.module == dst.module == "llm"}
    assert of_stages == {(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)}
    step = [pm.batch([tokens] * rows, m, vision=[0, 1]) for m in range(microbatches)]
    half = RankResources(cpus=0.5)
    with ParallelModel(model, plan, resources=half) as running:
        running.execute(step)
        assert sent_bytes(running) == due
