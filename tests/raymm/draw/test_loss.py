"""Curves of the loss: smoothing, gaps of modalities, and labels that keep apart."""

from __future__ import annotations

import math

import pytest

from raymm.draw.loss import HELDOUT, LINE, SHUFFLED, _curves, _smooth, _spread


def test_smoothing_has_no_bias_to_the_start() -> None:
    assert [v for _, v in _smooth([(i, 3.0) for i in range(100)])] == pytest.approx([3.0] * 100)
    values = [v for _, v in _smooth([(i, float(i % 2)) for i in range(400)])]
    assert max(values[-50:]) - min(values[-50:]) < 0.1 and abs(values[-1] - 0.5) < 0.1


def test_labels_keep_apart_and_in_order() -> None:
    placed = _spread([3.0, 3.01, 2.99, 0.0, 3.6], 3.6)
    order = sorted(placed)
    assert all(b - a >= LINE - 1e-9 for a, b in zip(order, order[1:], strict=False))
    assert placed[2] < placed[0] < placed[1] and min(placed) >= 0 and max(placed) <= 3.6


def test_gaps_are_shuffled_minus_held_out_at_the_same_step() -> None:
    _, gaps = _curves([
        {"step": 1, HELDOUT: 2.0, f"{SHUFFLED}vision": 2.5},
        {"step": 2, HELDOUT: math.nan, f"{SHUFFLED}vision": 3.0},
        {"step": 3, HELDOUT: 1.0, f"{SHUFFLED}vision": None},
        {"step": 4, HELDOUT: 1.0, f"{SHUFFLED}vision": 1.25},
    ])
    (gap,) = gaps
    assert gap.points == [(1, 0.5), (4, 0.25)] and gap.label.text == "vision gap +0.250"


def test_curves_without_a_finite_point_are_left_out() -> None:
    losses, gaps = _curves([{"step": 1, "loss": None}, {"step": 2, "loss": math.inf}])
    assert losses == gaps == []
    losses, _ = _curves([{"step": 1, "loss": 2.0}])
    assert [curve.name for curve in losses] == ["train"]
