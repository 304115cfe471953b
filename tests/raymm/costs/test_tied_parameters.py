"""State of stages with tied embeddings equals the parameters of each stage of a real model."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import transformers
from transformers import LlamaConfig

from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.weights.source import ConfigSource
from raymm.costs.analytic import analytic_layers, analytic_profile
from raymm.costs.load import Load
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.scheduler.costs.devices import find_device
from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.schedule.stage_costs import stage_costs
from raymm.scheduler.search.module_degrees import ALONE, make_plan
from raymm.scheduler.search.planner import stage_bytes
from raymm.scheduler.search.stage_space import StageSpace
from raymm.scheduler.search.uncut_modules import with_uncut_modules

BLOCKS = 3
NODE = ModuleNode("llm", (True,) * BLOCKS)
GRAPH = ModuleGraph((NODE,), ())
LIMIT = 10**9


def llama(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=BLOCKS, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=640, tie_word_embeddings=tied,
    )


def counted(tied: bool) -> tuple[CostProfile, int, int]:
    """Return the profile, with bytes of all parameters and of the embedding."""
    skeleton = ConfigSource(transformers.LlamaForCausalLM, llama(tied)).skeleton()
    layers = analytic_layers(skeleton, Load(1, 16), "cpu", "fp32", causal=True)
    exact = 4 * sum(p.numel() for p in skeleton.parameters())
    embedding = 4 * skeleton.get_input_embeddings().weight.numel()
    return CostProfile({"llm": layers}), exact, embedding


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_holds_a_tied_parameter_once(tied: bool, cuts: tuple[int, ...]) -> None:
    profile, exact, embedding = counted(tied)
    ranges = tuple(pairwise((0, *cuts, BLOCKS)))
    plan = make_plan(GRAPH, {"llm": ranges}, 2, profile=profile)
    held = exact + embedding * (tied and len(ranges) > 1)
    # In fp32 a weight has a gradient and two moments.
    assert sum(cost.state_bytes for cost in stage_costs(plan).values()) == 4 * held


@pytest.mark.parametrize("tied", [False, True])
def test_searches_know_the_state_of_every_stage(tied: bool) -> None:
    profile, _, _ = counted(tied)
    space = StageSpace(GRAPH, profile, 1, 2, memory_limit=LIMIT, degrees={"llm": ALONE})
    empty = StageSpace(
        GRAPH, CostProfile({"llm": tuple(
            type(c)(0.0, 0.0, 0.0) for c in profile.modules["llm"]
        )}), 1, 2, memory_limit=LIMIT,
    )
    with np.errstate(invalid="ignore"):  # ranges without layers
        state = stage_bytes(empty, "llm").room - stage_bytes(space, "llm").room
    for ranges in ([(0, 3)], [(0, 1), (1, 3)], [(0, 2), (2, 3)]):
        plan = make_plan(GRAPH, {"llm": tuple(ranges)}, 2, profile=profile)
        for (lo, hi), cost in zip(ranges, stage_costs(plan).values(), strict=True):
            assert state[lo, hi] == pytest.approx(cost.state_bytes)


def test_a_module_that_is_not_cut_holds_a_tied_parameter_once() -> None:
    profile, exact, _ = counted(True)
    _, merged = with_uncut_modules(GRAPH, profile, {"llm"})
    assert [cost.parameter_bytes for cost in merged.modules["llm"]] == [exact]


def test_adapter_gradients_move_no_bytes_of_the_base() -> None:
    """Use a device with instant products, so that B_w takes the time of its bytes."""
    device = find_device("H100")
    slow = type(device)(**{**vars(device), "flops": dict.fromkeys(device.flops, 1e30)})
    model = MultimodalModule({}, ModalityModule(llama(False), lora=LoraConfig(r=4)))
    tokens, rank = 64, 4
    layer = analytic_profile(model, {"llm": Load(1, tokens)}, slow, "bf16").modules["llm"][1]
    widths = [(32, 32)] * 4 + [(32, 64)] * 2 + [(64, 32)]
    moved = sum(tokens * (inner + 2 * rank + outer) for inner, outer in widths)
    weights = sum(rank * (inner + outer) for inner, outer in widths)
    exact = (2 * moved + 4 * weights) / device.memory_bandwidth
    assert layer.backward_weight == pytest.approx(exact)
