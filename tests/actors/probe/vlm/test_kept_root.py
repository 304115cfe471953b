"""Frozen part of a tower up to which features are cached."""

from __future__ import annotations

import pytest
import transformers

from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import runnable
from raymm.actors.weights.model_part import is_within
from raymm.errors import ProbeError
from raymm.model.vlm import from_pretrained


def described(name):
    """Return a model with a frozen tower that contains a projector."""
    model_class = getattr(transformers, name)
    config, microbatches = runnable(Family("whole model", model_class, model_class.config_class))
    config.architectures = [name]
    (tower,) = from_pretrained(config, microbatches[0]).towers
    frozen = {tower.name: "frozen"}
    if tower.projector and is_within(tower.projector[0], (tower.root,)):
        frozen["projector"] = "frozen"
    return from_pretrained(config, microbatches[0], frozen, seed=4), microbatches


def test_towers_that_read_more_than_features_are_refused():
    model, _ = described("DeepseekVLHybridForConditionalGeneration")
    with pytest.raises(ProbeError, match="reads more than its features"):
        model.root_form("vision")
