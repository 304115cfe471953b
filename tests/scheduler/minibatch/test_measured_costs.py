"""Measured costs: units and seconds of microbatches, and costs of samples instead of units."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.scheduler.graph.sample_ranges import share
from raymm.scheduler.minibatch.measured_costs import (
    PARTS,
    Column,
    MeasuredCosts,
    ModuleCost,
    efficiency,
    group_units,
    of_modules,
)
from raymm.scheduler.minibatch.problem import SampleSizes

NAMES = ("vision", "text")
SIZES = SampleSizes(NAMES, np.array([[2, 10], [0, 4], [3, 6], [1, 1]]))
COSTS = MeasuredCosts(
    {"vision": ModuleCost(0.5, 2.0), "text": ModuleCost(1.0, 0.1, 0.01)}, {"text": (0.5, 1.5)}
)


def test_units_by_hand():
    units, squares = group_units(SIZES, [[0, 1], [2], [1, 3]], packed=True)
    np.testing.assert_array_equal(units, [[2, 14], [3, 6], [1, 5]])
    np.testing.assert_array_equal(squares, [[4, 116], [9, 36], [1, 17]])
    units, squares = group_units(SIZES, [[0, 1], [2], [1, 3]], packed=False)
    np.testing.assert_array_equal(units, [[2, 20], [3, 6], [1, 8]])
    np.testing.assert_array_equal(squares, [[4, 200], [9, 36], [1, 32]])


def test_seconds_by_hand():
    """Use a microbatch without images, free for the encoder; text alternates between replicas."""
    units, squares = group_units(SIZES, [[1], [2], [0, 1]], packed=True)
    expected = [
        [0.0, 0.5 * (1 + 0.4 + 0.16)], [6.5, 1.5 * (1 + 0.6 + 0.36)],
        [4.5, 0.5 * (1 + 1.4 + 1.16)],
    ]
    np.testing.assert_allclose(COSTS.seconds(NAMES, units, squares), expected)
    assert efficiency(np.array(expected).T) == pytest.approx(
        (11 / 3 + sum(row[1] for row in expected) / 3) / (6.5 + expected[1][1])
    )
    assert efficiency(np.zeros((3, 2))) == 1.0


groups_of_samples = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5
)


@given(groups_of_samples, st.integers(1, 3), st.booleans())
def test_shares_of_replicas_are_consecutive_samples(groups, copies, packed):
    """Treat a replica's share as a microbatch, but padded to the longest of all."""
    columns = (Column("vision"), *(Column("text", k, copies) for k in range(copies)))
    found = group_units(SIZES, groups, packed, columns)
    for row, group in enumerate(groups):
        text = SIZES.values[group, 1]
        text = text if packed else np.full(len(group), text.max())
        for power, of_power in enumerate(found, 1):
            assert of_power[row, 0] == (SIZES.values[group, 0] ** power).sum()
            for k in range(copies):
                own = share(len(group), k, copies)
                assert of_power[row, 1 + k] == (text[own.lo : own.hi] ** power).sum()


def test_seconds_of_shares_by_hand():
    shared = MeasuredCosts(COSTS.modules, COSTS.replicas, frozenset({"text"}))
    columns = (Column("vision"), Column("text", 0, 2), Column("text", 1, 2))
    units = group_units(SIZES, [[0, 1], [2]], True, columns)
    expected = np.array([
        [4.5, 0.5 * (1 + 1 + 1), 1.5 * (1 + 0.4 + 0.16)], [6.5, 0.0, 1.5 * (1 + 0.6 + 0.36)],
    ])  # fmt: skip
    np.testing.assert_allclose(shared.column_seconds(columns, *units), expected)
    np.testing.assert_allclose(
        shared.even.column_seconds(columns, *units), expected / [1.0, 0.5, 1.5]
    )
    rows = of_modules(columns, expected)
    assert rows["vision"].tolist() == [4.5, 6.5]
    assert rows["text"].tolist() == expected[:, 1:].ravel().tolist()


@given(groups_of_samples)
def test_a_microbatch_costs_the_sum_of_its_samples(groups):
    """Add its fixed cost once."""
    of_samples = COSTS.of_samples(NAMES, SIZES.values)
    units, squares = group_units(SIZES, groups, packed=True)
    found = MeasuredCosts(COSTS.modules).seconds(NAMES, units, squares)
    for group, row, unit in zip(groups, found, units, strict=True):
        fixed = np.where(unit > 0, [0.5, 1.0], 0.0)
        np.testing.assert_allclose(row, fixed + of_samples[group].sum(0))


def test_costs_replace_units():
    levelled, weights = COSTS.in_units(SIZES)
    cost = COSTS.of_samples(NAMES, SIZES.values)
    for column, total in enumerate(SIZES.totals):
        share = cost[:, column] / cost[:, column].sum()
        np.testing.assert_allclose(levelled.values[:, column], PARTS * total * share, atol=0.5)
    assert weights[0] == 1.0 and weights[1] == pytest.approx(cost[:, 1].sum() / cost[:, 0].sum())


def test_unmeasured_modules_count_by_their_units():
    levelled, weights = MeasuredCosts({"text": ModuleCost(0, 1.0)}).in_units(SIZES)
    np.testing.assert_array_equal(levelled.values, PARTS * SIZES.values)
    assert 0 < weights[0] < weights[1] == 1.0
    levelled, weights = MeasuredCosts({}).in_units(SIZES)
    np.testing.assert_array_equal(levelled.values, PARTS * SIZES.values)
    assert weights.tolist() == [1.0, 1.0]


def test_json_is_exact_and_drops_other_replicas():
    odd = MeasuredCosts({"text": ModuleCost(1 / 3, 2 / 7, 1e-17)}, {"text": (1 / 3, 5 / 3)})
    again = MeasuredCosts.from_dict(json.loads(json.dumps(odd.to_dict())))
    assert again == odd and again.to_dict() == odd.to_dict()
    assert odd.for_replicas({"text": 2}) == odd
    assert odd.for_replicas({"text": 3}) == MeasuredCosts(odd.modules)
    assert odd.for_replicas({}) == MeasuredCosts(odd.modules)
    assert odd.for_replicas({"text": 2}, {"text"}) == MeasuredCosts(odd.modules)
    shared = MeasuredCosts(odd.modules, odd.replicas, frozenset({"text"}))
    assert MeasuredCosts.from_dict(json.loads(json.dumps(shared.to_dict()))) == shared
    assert shared.for_replicas({"text": 2}, {"text"}) == shared
    assert shared.for_replicas({"text": 2}) == MeasuredCosts(odd.modules)


@pytest.mark.parametrize(
    "data",
    [
        None, {}, {"modules": {}}, {"modules": {"text": [1]}, "copies": 3},
        {"modules": {"text": [1, 2, 3, 4]}, "copies": {}},
        {"modules": {"text": [-1, 0, 0]}, "copies": {}},
        {"modules": {"text": [float("nan"), 0, 0]}, "copies": {}},
        {"modules": {}, "copies": {}, "shared": ["text"]},
        {"modules": {}, "copies": {"text": [0.0, 2.0]}}, {"modules": {}, "copies": {"text": []}},
    ],
)
def test_invalid_costs(data):
    with pytest.raises(PlanError):
        MeasuredCosts.from_dict(data)
