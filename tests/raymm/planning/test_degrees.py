"""Degrees of VLMs in a search: exactly those that the model's code supports."""

from __future__ import annotations

import transformers

from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import runnable
from benchmarks.vlm_matrix import KIND
from raymm.model.model import LANGUAGE_MODEL
from raymm.model.vlm import from_pretrained
from raymm.planning.degrees import DegreeRequest, refused_degrees
from raymm.runtime.specs import ParallelSpec, vlm_plan


def whole(name):
    model_class = getattr(transformers, name)
    config, (microbatch, *_) = runnable(Family(KIND, model_class, model_class.config_class))
    config.architectures = [name]
    return from_pretrained(config, microbatch)


def test_a_vlm_has_the_degrees_of_its_code():
    model = whole("Gemma3ForConditionalGeneration")
    request = DegreeRequest.of(["tp", "cp", "dp"])
    tokens = dict.fromkeys(model.module_names, 10_000)
    choices = request.choices(model, 4, 2, tokens)
    assert choices[LANGUAGE_MODEL].tp[:2] == (1, 2) and choices[LANGUAGE_MODEL].cp == (1, 2, 4)
    plan = vlm_plan(model, {
        LANGUAGE_MODEL: ParallelSpec(tp=2, cp=2), "vision": ParallelSpec(tp=2, cp=2),
    })  # fmt: skip
    assert refused_degrees(model, plan) == {}


def test_unsupported_vlm_degrees_are_refused_with_reason():
    model = whole("MllamaForConditionalGeneration")
    plan = vlm_plan(model, {LANGUAGE_MODEL: ParallelSpec(cp=2)})
    refused = refused_degrees(model, plan)
    assert refused.keys() == {(LANGUAGE_MODEL, "cp", degree) for degree in (2, 3)}
    choices = DegreeRequest.of(["cp"]).choices(
        model, 2, 2, dict.fromkeys(model.module_names, 10_000), frozenset(refused)
    )
    assert choices[LANGUAGE_MODEL].cp == (1,)
