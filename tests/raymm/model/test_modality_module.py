"""Modules of a multimodal model, and models of them."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

import raymm
from raymm.errors import ModelError
from raymm.model.model import FROZEN, FULL

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
VISION = SiglipVisionConfig(image_size=16, patch_size=8, **SIZES)
TEXT = LlamaConfig(vocab_size=64, **SIZES)


def model(vision=VISION, text=TEXT, **options) -> raymm.MultimodalModule:
    return raymm.MultimodalModule({"vision": raymm.ModalityModule(vision, "mlp", **options)}, text)


def test_a_module_and_its_projector_are_frozen_separately() -> None:
    described = model()
    described.set_frozen("vision", True)
    assert described.mode("vision") == FROZEN and described.mode("vision_projector") == FULL
    described.set_frozen("vision_projector", True)
    described.set_frozen("vision", False)
    assert described.mode("vision") == FULL and described.mode("vision_projector") == FROZEN
    described.materialize()
    built = described.modalities["vision"]
    assert all(p.requires_grad for p in built.module.parameters())
    assert not any(p.requires_grad for p in built.projector.parameters())


def test_parts_have_the_names_of_their_state() -> None:
    described = model()
    assert described.modules_of("vision_projector") == described.modules_of("vision") == {"vision"}
    assert described.state_prefixes("vision_projector") == ("vision/projector.",)
    assert described.state_prefixes("llm") == ("llm/module.",)


def test_unknown_and_partly_frozen_parts_are_refused() -> None:
    with pytest.raises(ModelError, match="accepted: vision, llm, vision_projector"):
        model().mode("audio")
    module = SiglipVisionModel(VISION)
    next(module.parameters()).requires_grad_(False)
    with pytest.raises(ModelError, match="'vision', which is partly frozen"):
        model(module).mode("vision")


def test_modules_that_share_parameters_are_refused() -> None:
    vision, text = SiglipVisionModel(VISION), LlamaForCausalLM(TEXT)
    model(vision, text).check_unshared()
    text.model.norm.weight = vision.post_layernorm.weight
    with pytest.raises(ModelError, match="give each module a separate copy"):
        model(vision, text).check_unshared()


def test_only_weights_with_a_source_are_loaded_again() -> None:
    assert model().reloadable() == {"vision", "llm"}
    described = model(SiglipVisionModel(VISION))
    assert described.reloadable() == {"llm"}
    described.set_changing({"llm"})
    assert not described.reloadable()
