"""Loads of modules: their ranges, and tokens of an encoder from its config."""

from types import SimpleNamespace

import pytest
from torch import nn

from raymm.costs.load import Load, LoadedModule, SeenAttention, config_number, default_tokens
from raymm.errors import PlanError


class Encoder(nn.Module):
    def __init__(self, classes=0, **config):
        super().__init__()
        self.config = SimpleNamespace(hidden_size=4, **config)
        if classes:
            self.cls_token = nn.Parameter(nn.Linear(4, classes).weight.detach())


@pytest.mark.parametrize(("fields", "reason"), [
    ({"samples": 0}, "samples is 0; it must be a whole number >= 1"),
    ({"tokens": 1.5}, "tokens is 1.5; it must be a whole number >= 1"),
    ({"samples": True}, "samples is True; it must be a whole number >= 1"),
    ({"labels": -1}, "labels is -1; it must be a whole number >= 0"),
    ({"labels": 7}, "labels is 7, but there are only 6 tokens"),
])
def test_other_numbers_are_refused_by_field(fields, reason):
    assert Load(2, 3, 6).total == 6 and Load(2, 3, 0).labels == 0
    with pytest.raises(PlanError) as error:
        Load(**{"samples": 2, "tokens": 3, **fields})
    assert str(error.value) == reason


@pytest.mark.parametrize(("encoder", "tokens"), [
    (Encoder(image_size=8, patch_size=2), 16),
    (Encoder(image_size=9, patch_size=2, classes=1), 17),
    (Encoder(image_size=(8, 4), patch_size=[2, 4], classes=3), 7),
    (Encoder(max_source_positions=1500), 1500),
])
def test_tokens_are_patches_and_class_tokens(encoder, tokens):
    assert default_tokens(encoder) == tokens


def test_a_config_without_sizes_is_refused_by_class():
    with pytest.raises(PlanError, match="the config of Encoder does not say how many tokens"):
        default_tokens(Encoder(image_size=8))


def test_calls_of_attention_are_added_and_divided():
    seen = SeenAttention(4, 8, 32, 1, 2, 3, 4)
    assert seen.joined(seen).over(2) == seen
    assert seen.over(4)[:3] == (1, 2, 8)


def test_the_first_integer_of_a_config_is_taken():
    config = SimpleNamespace(d_model=True, n_embd=5)
    assert config_number(("hidden_size", "d_model", "n_embd"), None, config) == 5
    assert config_number(("hidden_size",), config) is None


def test_a_pooling_head_has_a_row_per_sample():
    module = nn.ModuleDict({"blocks": nn.Linear(1, 1), "pooler": nn.Linear(1, 1)})
    loaded = LoadedModule(module, Load(2, 3, places=(("blocks", 0.5),)), causal=False)
    assert loaded.rows("pooler") == 2 and loaded.rows("blocks") == 3 and loaded.rows("") == 6
