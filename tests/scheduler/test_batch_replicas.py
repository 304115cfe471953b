"""Encoder replicas get what their ranks' samples have, evenly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.minibatch.balanced import plan_balanced
from raymm.scheduler.minibatch.baselines import plan_random
from raymm.scheduler.minibatch.metrics import dist_ratio, loads
from raymm.scheduler.minibatch.problem import MiniBatchError, SampleSizes
from raymm.scheduler.minibatch.replicas import place, replica_loads, shares
from tests.scheduler.minibatch_data import groups_of, real, sizes


@given(sizes(least=8), st.sampled_from([(8, 2), (8, 4), (4, 1), (6, 6), (3, 6), (2, 8), (1, 3)]))
def test_loads_are_sums_of_the_samples_of_the_ranks_served(of, case) -> None:
    ranks, replicas = case
    plan = plan_balanced(of, ranks)
    found = replica_loads(plan, of, "a", replicas)
    assert found.shape == (plan.steps, replicas)
    for step, row in enumerate(groups_of(plan)):
        units = [sum(int(of.values[sample, 0]) for sample in group) for group in row]
        if replicas <= ranks:
            k = ranks // replicas
            assert found[step].tolist() == [sum(units[r * k : r * k + k]) for r in range(replicas)]
            continue
        for rank, group in enumerate(row):
            k = replicas // ranks
            parts = shares(plan, of, "a", replicas, step, rank)
            lengths = [sum(stop - start for _, start, stop in part) for part in parts]
            assert lengths == found[step, rank * k : rank * k + k].tolist()
            assert max(lengths) - min(lengths) <= 1
            # Every unit of every sample once, in order.
            seen = [
                (sample, unit) for sample, start, stop in itertools.chain(*parts)
                for unit in range(start, stop)
            ]
            assert seen == [
                (sample, unit) for sample in group for unit in range(of.values[sample, 0])
            ]


@st.composite
def placed(draw: st.DrawFn) -> tuple[SampleSizes, int, dict[str, int]]:
    ranks, serving = draw(st.sampled_from([
        (4, {"a": 2}), (6, {"a": 2}), (6, {"a": 3}), (6, {"a": 2, "b": 3}), (4, {"a": 2, "b": 2}),
    ]))
    rows = draw(st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=ranks, max_size=ranks,
    ))
    return SampleSizes(("a", "b"), np.array(rows)), ranks, serving


def squares(of: SampleSizes, order: tuple[int, ...], serving: dict[str, int]) -> float:
    """Sum of squares of replica loads, each modality relative to its mean group."""
    total = 0.0
    for name, replicas in serving.items():
        column = of.values[:, of.column(name)] / max(of.values[:, of.column(name)].mean(), 1.0)
        served = column[list(order)].reshape(replicas, -1).sum(1)
        total += (served**2).sum()
    return total


@given(placed())
def test_placement_against_all_orders_of_a_step(case) -> None:
    of, ranks, serving = case
    order = place(
        np.arange(ranks)[None], np.arange(ranks), np.arange(ranks + 1), of, serving
    )[0]
    assert sorted(order) == list(range(ranks))
    found = squares(of, tuple(order), serving)
    assert found <= squares(of, tuple(range(ranks)), serving) + 1e-9
    best = min(squares(of, order, serving) for order in itertools.permutations(range(ranks)))
    # Exchanges of two end where no exchange of two helps.
    assert found <= 1.1 * best + 1e-9


@pytest.mark.parametrize("serving", [{"vision": 8}, {"vision": 4, "text": 16}])
def test_replicas_of_real_data_are_level_as_well(serving: dict[str, int]) -> None:
    of = real("chartqa")
    plan = plan_balanced(of, 64, serving=serving)
    for name, replicas in serving.items():
        assert dist_ratio(replica_loads(plan, of, name, replicas)) < 0.001
        naive = dist_ratio(replica_loads(plan_random(of, 64), of, name, replicas))
        assert naive > 0.01
    # The ranks themselves lose nothing by it.
    alone = plan_balanced(of, 64)
    for column in range(2):
        assert dist_ratio(loads(plan, of)[:, :, column]) == pytest.approx(
            dist_ratio(loads(alone, of)[:, :, column])
        )


def test_replicas_and_ranks_must_divide_each_other() -> None:
    of = real("ai2d")
    plan = plan_balanced(of, 8)
    with pytest.raises(MiniBatchError, match=r"serving\['vision'\] must divide the 8 ranks"):
        replica_loads(plan, of, "vision", 3)
    with pytest.raises(MiniBatchError, match="replicas must be a multiple of 8 ranks, got 4"):
        shares(plan, of, "vision", 4, 0, 0)
