"""Modules of a model under a plan."""

import pytest
import torch
from transformers import LlamaConfig, SiglipVisionConfig

import raymm
from raymm.actors.probe.callbacks import Cuts
from raymm.actors.stages.encoder import EncoderStage
from raymm.actors.stages.feature_stage import FeatureStage
from raymm.actors.stages.language import LanguageStage
from raymm.errors import PlanError, ProbeError
from raymm.model.module import EncoderModule, LanguageModule
from raymm.scheduler.plan.stage import Stage

SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2)
CUT = Cuts(True, False)


def model() -> raymm.MultimodalModule:
    vision = raymm.ModalityModule(SiglipVisionConfig(image_size=8, patch_size=4, **SIZES), "mlp")
    return raymm.MultimodalModule({"vision": vision}, LlamaConfig(vocab_size=32, **SIZES))


def test_a_cut_keeps_the_description_and_finds_the_blocks() -> None:
    described = model()
    for name, kind, blocks in (
        ("vision", EncoderModule, "encoder.layers"), ("llm", LanguageModule, "model.layers"),
    ):
        module = described.module(name)
        assert isinstance(module, kind) and module.causal == (name == "llm")
        spec = module.cut(CUT)
        assert spec.cut is not None and spec.cut.blocks == blocks and spec.name == name
        owned = [name for lo in range(4) for name in module.stage_parameters(spec, lo, lo + 1)]
        assert len(owned) == len(set(owned))


def test_only_the_first_stage_of_an_encoder_is_cached() -> None:
    described = model()
    vision, llm = described.module("vision"), described.module("llm")
    assert vision.stage_class(0, cached=True) is FeatureStage
    assert vision.stage_class(2, cached=True) is EncoderStage
    assert vision.stage_class(0, cached=False) is EncoderStage
    assert llm.stage_class(0, cached=True) is LanguageStage


def test_items_are_split_by_inputs_with_a_row_per_item() -> None:
    spec = model().module("vision").spec
    rows = {"pixel_values": torch.zeros(2, 3, 8, 8), "sizes": torch.zeros(2)}
    assert EncoderModule(spec, rows).share_rows(spec) is spec
    with pytest.raises(PlanError, match="sharding of 'vision'"):
        EncoderModule(spec, {**rows, "sizes": torch.zeros(5)}).share_rows(spec)


def test_other_inputs_are_tried_only_under_a_plan_that_they_may_break() -> None:
    module, stage = model().module("vision"), Stage("vision", 0, 0, (0, 4))
    assert module.retry(module.spec, Cuts(False, False), stage, {}) is None
    attempt = module.retry(module.cut(CUT), CUT, stage, {})
    assert attempt is not None
    attempt({"pixel_values": torch.randn(1, 3, 8, 8)})
    with pytest.raises(ProbeError):
        attempt({"pixel_values": torch.randn(1, 3, 8, 8, 2)})
