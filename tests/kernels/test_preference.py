"""The DPO loss and its rewards follow eq. 7, pair by pair."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymm.kernels.preference import PreferenceLoss

SCORES = st.lists(st.tuples(*[st.floats(-50, 0)] * 4), min_size=1, max_size=5)


@given(SCORES, st.floats(0.01, 5), st.floats(0, 0.49))
def test_the_loss_and_the_rewards_equal_sums_over_pairs(pairs, beta, smoothing):
    scores = torch.tensor([s for c, r, _, _ in pairs for s in (c, r)], dtype=torch.float64)
    reference = torch.tensor([s for _, _, c, r in pairs for s in (c, r)], dtype=torch.float64)
    loss = PreferenceLoss(beta, smoothing)

    def minus_log_sigmoid(x: float) -> float:
        return math.log1p(math.exp(-abs(x))) + max(-x, 0.0)

    margins = [beta * ((c - cr) - (r - rr)) for c, r, cr, rr in pairs]
    expected = sum(
        (1 - smoothing) * minus_log_sigmoid(m) + smoothing * minus_log_sigmoid(-m) for m in margins
    )
    assert float(loss(scores, reference)) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    rewards = loss.rewards(scores, reference)
    assert rewards["rewards/margins"] == pytest.approx(sum(margins) / len(pairs), abs=1e-9)
    assert rewards["rewards/chosen"] - rewards["rewards/rejected"] == pytest.approx(
        rewards["rewards/margins"], abs=1e-9
    )


def test_accuracy_counts_pairs_with_the_better_answer_first():
    loss = PreferenceLoss()
    scores, reference = torch.tensor([-1.0, -2.0, -3.0, -1.0]), torch.zeros(4)
    assert loss.rewards(scores, reference)["rewards/accuracies"] == 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beta": 0.0}, "beta is 0.0; accepted: a number above 0"),
        ({"beta": math.inf}, "beta is inf"),
        ({"label_smoothing": 0.5}, "label_smoothing is 0.5; accepted: from 0 to below 0.5"),
        ({"reference": "other"}, "reference is 'other'; accepted: base, initial"),
    ],
)
def test_invalid_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        PreferenceLoss(**fields)
    assert PreferenceLoss(reference="initial").asked_once and not PreferenceLoss().asked_once
