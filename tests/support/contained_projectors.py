"""Hugging Face VLMs with a frozen tower that contains a projector."""

from __future__ import annotations

from typing import Any

import transformers

from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import runnable
from raymm.actors.weights.model_part import is_within
from raymm.model.vlm import PretrainedVlm, from_pretrained


def frozen_tower(name: str) -> tuple[PretrainedVlm, Any]:
    """Return a small model of a class with its tower frozen, and microbatches."""
    model_class = getattr(transformers, name)
    config, microbatches = runnable(Family("whole model", model_class, model_class.config_class))
    config.architectures = [name]
    (tower,) = from_pretrained(config, microbatches[0]).towers
    frozen = {tower.name: "frozen"}
    if tower.projector and is_within(tower.projector[0], (tower.root,)):
        frozen["projector"] = "frozen"
    return from_pretrained(config, microbatches[0], frozen, seed=4), microbatches
