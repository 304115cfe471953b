"""Difficult classes of transformers, cut in two, equal the uncut class in training mode."""

import pytest
import torch

from benchmarks.families import QUICK
from benchmarks.shared.family_check import EXACT, REFUSED, check
from benchmarks.shared.family_classes import ENCODER, LANGUAGE, named


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind, name", [(k, n) for k in (LANGUAGE, ENCODER) for n in QUICK[k]])
def test_a_family_is_exact(kind, name):
    outcome = check(named(kind, name))
    assert (outcome.result, outcome.sentence) == (EXACT, "")


@pytest.mark.parametrize(
    "kind, name, why",
    [
        (LANGUAGE, "Gemma3nForCausalLM", "ids for more than their embeddings"),  # per layer
        (LANGUAGE, "CpmAntForCausalLM", "input_ids only"),
    ],
)
def test_a_family_that_cannot_be_cut_is_refused_by_name(kind, name, why):
    outcome = check(named(kind, name))
    assert outcome.result == REFUSED, outcome.sentence
    assert name in outcome.sentence and why in outcome.sentence
