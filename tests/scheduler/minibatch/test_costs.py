"""Costs of samples equal the polynomial of each modality."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.scheduler.minibatch.costs import CostModel, UnitCost, even_costs
from raymm.scheduler.minibatch.problem import SampleSizes

UNITS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=9)


@given(UNITS, st.integers(0, 9), st.integers(0, 9))
def test_costs_equal_a_loop_over_samples(units, linear: int, quadratic: int) -> None:
    costs = CostModel((UnitCost(linear, quadratic), UnitCost()))
    expected = [[linear * x + quadratic * x**2, y] for x, y in units]
    assert costs.of_units(np.array(units)).tolist() == expected


@given(UNITS)
def test_even_costs_of_each_modality_add_up_to_one(units) -> None:
    sizes = SampleSizes(("vision", "text"), np.array(units))
    totals = even_costs(sizes).of_units(sizes.values).sum(0)
    assert totals.tolist() == pytest.approx([float(total > 0) for total in sizes.totals])


def test_another_number_of_modalities_is_refused() -> None:
    message = "the cost model has 1 modalities, the sizes have 2"
    with pytest.raises(PlanError, match=message):
        CostModel((UnitCost(),)).of_units(np.zeros((3, 2)))
