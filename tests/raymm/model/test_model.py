"""Common interface of models."""

import pytest
from transformers import LlamaConfig, SiglipVisionConfig

import raymm
from raymm.errors import ModelError
from raymm.kernels.preference import PreferenceLoss
from raymm.model.features import Feature, Kind
from raymm.model.model import only_loss

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)


def model() -> raymm.MultimodalModule:
    vision = raymm.ModalityModule(SiglipVisionConfig(image_size=16, patch_size=8, **SIZES), "mlp")
    return raymm.MultimodalModule({"vision": vision}, LlamaConfig(vocab_size=64, **SIZES))


class Twice(raymm.StageHook):
    def output(self, features, call):
        return features * 2


def test_a_missing_feature_names_the_kinds_that_have_it() -> None:
    lacking = Feature("dreams", parts="it does not sleep")
    with pytest.raises(ModelError) as caught:
        model().require(lacking, "run.dreams is true")
    assert str(caught.value).startswith("run.dreams is true; accepted for ")
    assert f"not for {Kind.PARTS}: it does not sleep" in str(caught.value)
    with pytest.raises(ModelError, match="dreams; accepted"):
        model().require(lacking)
    model().require(Feature("dreams", graph="it does not sleep"))


def test_hooks_of_an_encoder_are_kept_in_their_order() -> None:
    described, first, second = model(), Twice(), Twice()
    described.add_stage_hook("vision", first)
    described.add_stage_hook("vision", second)
    assert described.stage_hooks == {"vision": (first, second)}
    assert not model().stage_hooks
    with pytest.raises(ModelError, match="audio"):
        described.add_stage_hook("audio", first)


def test_two_losses_are_refused() -> None:
    def loss(logits, targets):
        return logits.sum(-1)

    preference = PreferenceLoss()
    assert only_loss(None, loss) is loss and only_loss(preference, None) is None
    with pytest.raises(ModelError, match="preference and token_loss are given"):
        only_loss(preference, loss)
