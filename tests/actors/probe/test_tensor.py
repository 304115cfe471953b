"""The probe, which compares shards of a module with the full module.

It accepts correct plans, finds the layout of fused projections, and rejects by name modules that no
plan fits.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from raymm.actors.probe.tensor import (
    compare_shards,
    example_run,
    probe_tensor,
    run_whole,
)
from raymm.actors.sharding.tensor_plan import TensorPlan, plan_module, tensor_plan
from raymm.actors.weights.source import LiveSource
from raymm.errors import ProbeError
from tests.support.shard_models import FUSED, LANGUAGE, module_of, pm


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_the_probe_accepts_correct_plans(case: str) -> None:
    source = LiveSource.of(module_of(LANGUAGE[case]()))
    assert probe_tensor(source, 2, "llm") == tensor_plan(source, 2, "llm")


@pytest.mark.parametrize("case", FUSED)
def test_the_probe_finds_how_projections_are_fused(case: str) -> None:
    source = LiveSource.of(module_of(LANGUAGE[case]()))
    assert "gathered_column" in tensor_plan(source, 2, "llm").styles.values()
    assert "gathered_column" not in probe_tensor(source, 2, "llm").styles.values()


def wrong_plans() -> list[Any]:
    """Return possible errors of a rule, and the probe's message."""

    def without(plan: TensorPlan, end: str) -> TensorPlan:
        return replace(plan, styles={n: s for n, s in plan.styles.items() if not n.endswith(end)})

    def swapped(plan: TensorPlan) -> TensorPlan:
        name = "model.layers.1.self_attn.k_proj.weight"
        return replace(plan, shards={**plan.shards, name: plan.shards[name][::-1]})

    return [
        (lambda plan: without(plan, "1.mlp.down_proj"), "output of shard 0 differs"),
        (lambda plan: without(plan, "1.mlp.up_proj"), "the gradient of "),
        (lambda plan: replace(plan, head=None), "output of shard 0"),
        (swapped, "output of shard 0 differs"),
    ]


@pytest.mark.parametrize(("spoil", "why"), wrong_plans())
def test_the_probe_detects_wrong_plans(spoil: Any, why: str) -> None:
    model = module_of(pm.qwen3()).eval()
    plan = plan_module(model, 2, "llm")
    run, inputs = example_run(model, None)
    expected = run_whole(model, run, inputs)
    assert compare_shards(model, plan, run, inputs, expected) == (None, frozenset())
    failure, _ = compare_shards(model, spoil(plan), run, inputs, expected)
    assert failure is not None
    assert re.search(why, failure)


def test_the_probe_finds_partial_gradients_of_shards() -> None:
    model = module_of(pm.qwen3()).eval()
    plan = plan_module(model, 2, "llm")
    run, inputs = example_run(model, None)
    expected = run_whole(model, run, inputs)
    forgotten = replace(plan, partial=frozenset())
    found = compare_shards(model, forgotten, run, inputs, expected)
    assert found == (None, plan.partial) and len(plan.partial) == 6


class Shuffled(nn.Module):
    """Module with the names of a plain feed-forward, and another forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.linear(hidden, self.fc1.weight, self.fc1.bias)
        return hidden + nn.functional.linear(inner.softmax(-1), self.fc2.weight)


def test_a_module_that_no_plan_fits_is_refused_by_name() -> None:
    inputs = {"hidden": torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))}
    with pytest.raises(ProbeError, match="tp of 'vision' is 2, but Shuffled cannot be sharded"):
        probe_tensor(LiveSource.of(Shuffled()), 2, "vision", inputs)


def test_inputs_of_unsharded_layers_are_gathered() -> None:
    class Softmaxed(Shuffled):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + self.fc2(self.fc1(hidden).softmax(-1))

    inputs = {"hidden": torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))}
    plan = probe_tensor(LiveSource.of(Softmaxed()), 2, "vision", inputs)
    assert plan.styles == {"fc1": "gathered_column", "fc2": "split_row"}
