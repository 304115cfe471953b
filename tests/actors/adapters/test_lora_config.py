"""Fields of a configuration of adapters."""

import math

import pytest

from raymm.actors.adapters.lora_config import LoraConfig
from raymm.errors import ModelError


@pytest.mark.parametrize(("field", "value"), [
    ("r", 0), ("r", 2.0), ("r", True), ("alpha", 0), ("alpha", math.inf), ("alpha", "8"),
    ("dropout", 1.0), ("dropout", -0.1), ("targets", ()), ("targets", ["q_proj"]),
    ("use_rslora", 1), ("base", "int2"),
])  # fmt: skip
def test_an_invalid_field_is_named(field, value):
    with pytest.raises(ModelError, match=rf"^{field} is .*; accepted: "):
        LoraConfig(**{field: value})


@pytest.mark.parametrize(("ranked", "due"), [(False, 32 / 16), (True, 32 / 4)])
def test_the_scaling_follows_the_rank(ranked, due):
    assert LoraConfig(r=16, alpha=32, use_rslora=ranked).scaling == due
