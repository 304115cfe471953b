"""Counted parameters, FLOPs and bytes of some modules equal torch's measurements.

``python -m benchmarks.cost_truth`` covers all kinds of modules.
"""

from __future__ import annotations

import pytest

from benchmarks.cost_truth import BYTES, FLOPS, error, rows_of
from benchmarks.shared.cost_cases import cases

NAMES = (
    "windows that merge", "native sizes, windows", "projector, mlp", "convolutions",
    "dense, grouped queries", "latent attention", "adapters with norms", "linear attention",
    "linear attention, decays", "state space, chunks", "state space beside attention",
    "cross attention",
)


@pytest.mark.parametrize("name", NAMES)
def test_costs_equal_torch_measurements(name: str) -> None:
    (case,) = (case for case in cases() if case.name == name)
    row = next(iter(rows_of(case)))
    assert error(row, "parameters") == 0
    assert max(error(row, figure) for figure in FLOPS) <= 0.02
    assert error(row, "messages") == 0
    assert max(error(row, figure) for figure in BYTES) <= 0.05
