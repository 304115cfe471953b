"""Sharded modules of VLMs equal the models' own forward in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.shared.family_check import EXACT, REFUSED
from benchmarks.shared.ranks import gloo_ranks
from benchmarks.shared.vlm_shares import outcome
from benchmarks.vlm_layouts import CLASSES, LAYOUTS, PROCESSES

QWEN2_5, QWEN3, EXPERTS, GEMMA3, AUDIO = CLASSES
PALIGEMMA = "PaliGemmaForConditionalGeneration"


@pytest.fixture(scope="module")
def ranks():
    with gloo_ranks(PROCESSES) as running:
        yield running


@pytest.mark.cells(3)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (QWEN3, "cp 2, pp 2, tower fsdp 2"),  # features into layers of both stages
        (EXPERTS, "tp 2"),
        (QWEN2_5, "fsdp 2, pp 2"),  # images of any grid, sharded over processes
        (QWEN3, "tp 2, lora"),
        (GEMMA3, "packing, cp 2"),  # bidirectional images, windows
        (GEMMA3, "fsdp 2, tower frozen"),
        (PALIGEMMA, "packing, cp 2"),  # builds the masks of its text model itself
        (AUDIO, "packing, fsdp 2, pp 2"),
    ],
)
def test_a_sharded_vlm_is_exact(ranks, name, layout):
    every = ranks.run(outcome, name=name, layout=LAYOUTS[layout])
    assert [(one.result, one.sentence) for one in every] == [(EXACT, "")] * PROCESSES


@pytest.mark.cells(1)
@pytest.mark.parametrize("name", [AUDIO, QWEN2_5])  # positions in one dimension, and in three
@pytest.mark.parametrize("layout", ["packing, fsdp 2, pp 2", "cp 2"])
def test_frequencies_follow_the_globally_longest_text(ranks, name, layout):
    """Give some processes no token beyond the trained positions."""
    every = ranks.run(outcome, name=name, layout=replace(LAYOUTS[layout], longrope=20))
    assert [(one.result, one.sentence) for one in every] == [(EXACT, "")] * PROCESSES


@pytest.mark.parametrize(
    ("name", "layout", "why"),
    [
        ("MllamaForConditionalGeneration", "cp 2", "cp of 'llm' is 2; accepted: 1"),
        ("MllamaForConditionalGeneration", "packing", "packing is true; accepted: false"),
    ],
)
def test_unshardable_vlms_are_rejected_by_name(ranks, name, layout, why):
    for one in ranks.run(outcome, name=name, layout=LAYOUTS[layout]):
        assert one.result == REFUSED
        assert why in one.sentence
