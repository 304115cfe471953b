"""FLOPs of a VLM's step per module equal torch's count."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForMultimodalLM

from examples.vlm.kinds import KINDS
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.config.vlm import example_batch
from raymm.costs import step_flops
from raymm.costs.step_flops import VlmStepFlops
from raymm.costs.workload import microbatch_workload
from raymm.data import DataConfig, local_steps
from raymm.model.vlm import from_pretrained
from tests.support.tiny_folders import modalities, tiny


def described(kind, train):
    folder, data = tiny(kind)
    config = DataConfig.model_validate({
        "train": data, "processor": folder, "modalities": modalities(kind), "batch_size": 3,
        "microbatches": 3, "shuffle": False,
    })
    model = from_pretrained(folder, example_batch(config), train)
    step = next(local_steps(config.model_copy(update={"towers": model.tower_inputs}), steps=1))
    return model, step


def counted_by_torch(kind, trained, step):
    """Count FLOPs of transformers' own model, without the rows that raymm's head skips."""
    model = AutoModelForMultimodalLM.from_pretrained(tiny(kind)[0], attn_implementation="eager")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    with FlopCounterMode(display=False) as counter:
        for batch in step.microbatches:
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits
            F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
            batch["labels"] = labels
    head = model.get_output_embeddings().weight
    rows = sum(batch["labels"].numel() for batch in step.microbatches)
    left_out = rows - sum(meta.label_tokens for meta in step.meta)
    return counter.get_total_flops() - 2 * head.numel() * left_out * (2 + head.requires_grad)


@pytest.mark.cells(6)
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl", "qwen2_5_vl", "mistral3", "qwen2_audio"])
@pytest.mark.parametrize("frozen", [(), ("tower",), ("language_model",)])
def test_a_steps_flops_equal_torchs_count(kind, frozen, monkeypatch):
    tower = "audio" if KINDS[kind].sound else "vision"
    names = [tower if name == "tower" else name for name in frozen]
    model, step = described(kind, dict.fromkeys(names, "frozen"))
    # Eager attention computes masked pairs, too.
    monkeypatch.setattr(step_flops, "visible_pairs", lambda length, _: length * length)
    counter = VlmStepFlops(model)
    counts = counter.of(step.meta)
    assert set(counts) == {tower, "llm"} and min(counts.values()) > 0
    due = counted_by_torch(kind, set().union(*model.trained.values()), step)
    assert sum(counts.values()) == pytest.approx(due, rel=0.01)
    loads = [microbatch_workload(model, batch).by_module for batch in step.microbatches]
    assert sum(map(counter.of_loads, loads)) == pytest.approx(due, rel=0.01)


def test_pairs_that_are_masked_do_not_count(monkeypatch):
    model, step = described("gemma3", {})
    counted = VlmStepFlops(model).of(step.meta)["llm"]
    assert [step_flops.visible_pairs(4, window) for window in (None, 2, 8)] == [10, 7, 10]
    monkeypatch.setattr(step_flops, "visible_pairs", lambda length, _: length * length)
    assert counted < VlmStepFlops(model).of(step.meta)["llm"]


def test_adapters_count_less_than_all_weights():
    both = [
        VlmStepFlops(model).of(step.meta)["llm"]
        for model, step in (
            described("gemma3", train)
            for train in ({}, {"language_model": LoraConfig(r=2, alpha=4), "vision": "frozen"})
        )
    ]
    assert 0.6 * both[0] < both[1] < 0.8 * both[0]
