"""Levelling and exchanges equal brute force on small cases, and keep their invariants."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.minibatch.levelling import (
    exchange_steps,
    fill,
    level,
    make_room,
    spread_sources,
)


@st.composite
def levelled(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    columns = draw(st.integers(1, 3))
    rows = draw(st.lists(
        st.tuples(*[st.integers(0, 20)] * columns), min_size=1, max_size=30,
    ))
    budgets = draw(st.tuples(*[st.integers(20, 60) | st.just(np.inf)] * columns))
    return np.array(rows, float), np.array(budgets, float), draw(st.integers(1, 8))


@given(levelled(), st.lists(st.integers(0, 9), max_size=4))
def test_samples_minimize_the_sum_of_squares(case, extra) -> None:
    sizes, budgets, groups = case
    extra = np.repeat(np.array(extra, float)[:, None], sizes.shape[1], axis=1)
    order = np.argsort(-sizes.sum(1), kind="stable")
    group_of = np.full(len(sizes), -2)
    extra = extra[: min(len(order), groups)]
    spilled = level(sizes, order, budgets, groups, group_of, extra)
    assert group_of[order[: len(extra)]].tolist() == list(range(len(extra)))
    above = np.zeros((groups, sizes.shape[1]))
    above[: len(extra)] -= extra
    loads = np.zeros_like(above)
    for place, sample in enumerate(order):
        if place < len(extra):
            loads[place] += sizes[sample]
            above[place] += sizes[sample]
            continue
        growth = [
            ((load + sizes[sample]) ** 2).sum() - (load**2).sum() for load in above
        ]
        fitting = [g for g in range(groups) if (loads[g] + sizes[sample] <= budgets).all()]
        if not fitting:
            assert group_of[sample] == -1
            continue
        assert growth[group_of[sample]] == min(growth[g] for g in fitting)
        loads[group_of[sample]] += sizes[sample]
        above[group_of[sample]] += sizes[sample]
    assert spilled == (group_of == -1).sum()
    assert (loads <= budgets).all()


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, np.ndarray]:
    """Draw sizes, samples group after group, group offsets, ranks, and sufficient budgets."""
    ranks, number = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    counts = draw(st.lists(
        st.integers(0, 4), min_size=ranks * number, max_size=ranks * number,
    ))
    n, columns = sum(counts), draw(st.integers(1, 2))
    rows = draw(st.lists(
        st.tuples(*[st.integers(0, 12)] * columns), min_size=n, max_size=n,
    ))
    sizes = np.array(rows, float).reshape(n, columns)
    samples = np.array(draw(st.permutations(range(n))), np.int64)
    offsets = np.cumsum([0, *counts])
    loads = group_loads(sizes, samples, offsets)
    budgets = loads.max(0) + draw(st.integers(0, 5)) if len(loads) else np.zeros(columns)
    return sizes, samples, offsets, ranks, budgets


def group_loads(sizes: np.ndarray, samples: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    return np.array([
        sizes[samples[a:b]].sum(0) for a, b in itertools.pairwise(offsets)
    ]).reshape(len(offsets) - 1, -1)


@given(steps(), st.integers(1, 4), st.booleans())
def test_exchanges_stay_in_their_step_and_lower_its_squares(case, candidates, capped) -> None:
    sizes, samples, offsets, ranks, budgets = case
    before, old = group_loads(sizes, samples, offsets), samples.copy()
    exchange_steps(sizes, samples, offsets, ranks, budgets, 1e-9, 1000, candidates, capped)
    after = group_loads(sizes, samples, offsets)
    assert (after <= budgets + 1e-9).all()
    for first in range(0, len(offsets) - 1, ranks):
        part = slice(offsets[first], offsets[first + ranks])
        assert sorted(samples[part]) == sorted(old[part])
        rows = slice(first, first + ranks)
        assert (after[rows] ** 2).sum() <= (before[rows] ** 2).sum() + 1e-9
        assert not capped or after[rows, -1].max() <= before[rows, -1].max() + 1e-9


@given(steps())
def test_final_groups_cannot_be_improved_by_exchanges(case) -> None:
    sizes, samples, offsets, ranks, budgets = case
    before = None
    while before is None or (before != samples).any():
        before = samples.copy()
        exchange_steps(sizes, samples, offsets, ranks, budgets, 1e-9, 10_000, ranks, False)
    loads = group_loads(sizes, samples, offsets)
    for first in range(0, len(offsets) - 1, ranks):
        rows = range(first, first + ranks)
        above = loads[rows] - loads[rows].mean(0)
        squares = (loads[rows] ** 2).sum()
        for heavy, other in itertools.permutations(rows, 2):
            column = int(above[heavy - first].argmax())
            furthest = above[heavy - first, column]
            if furthest <= 1e-6 or (above[heavy - first] > furthest - 1e-6).sum() > 1:
                continue  # level, or rounding decides which column is used
            if loads[other, column] >= loads[heavy, column]:
                continue
            for i in range(offsets[heavy], offsets[heavy + 1]):
                for j in range(offsets[other], offsets[other + 1]):
                    d = sizes[samples[j]] - sizes[samples[i]]
                    tried = loads[rows].copy()
                    tried[heavy - first] += d
                    tried[other - first] -= d
                    if d[column] < 0 and (tried <= budgets).all():
                        assert (tried**2).sum() >= squares - 1e-6


def test_exchanges_find_the_best_step() -> None:
    # All assignments of six samples to two groups of three: none beats the exchanges by more than a
    # tenth of the mean group, and mostly none at all.
    random = np.random.default_rng(0)
    best = 0
    for _ in range(200):
        sizes = random.integers(1, 50, (6, 1)).astype(float)
        samples, offsets = np.arange(6), np.array([0, 3, 6])
        exchange_steps(sizes, samples, offsets, 2, np.array([np.inf]), 1e-9, 100, 2, False)
        found = group_loads(sizes, samples, offsets).max()
        optimum = min(
            max(part, sizes.sum() - part)
            for part in (sizes[list(c), 0].sum() for c in itertools.combinations(range(6), 3))
        )
        assert found <= optimum + 0.1 * sizes.sum() / 2
        best += found == optimum
    assert best > 150


@st.composite
def sources(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Draw samples, their step, key of equal sizes, data set, and the number of data sets."""
    n, kinds = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    step_of = np.sort(np.array(draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))))
    key = np.array(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    of = np.array(draw(st.lists(st.integers(0, kinds - 1), min_size=n, max_size=n)))
    samples = np.array(draw(st.permutations(range(n))), np.int64)
    return samples, step_of, key, of, kinds


def spread(case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]) -> np.ndarray:
    samples, step_of, key, of, kinds = case
    samples = samples.copy()
    places = np.argsort(key[samples], kind="stable")
    cells = np.flatnonzero(np.diff(key[samples[places]], prepend=-1, append=-1))
    spread_sources(samples, step_of, places, cells, of, kinds)
    return samples


@given(sources())
def test_spreading_exchanges_only_samples_of_equal_size(case) -> None:
    samples, _, key, _, _ = case
    after = spread(case)
    assert sorted(after) == sorted(samples)
    assert (key[after] == key[samples]).all()


def test_spreading_gives_every_step_its_share() -> None:
    # Three data sets of 2:1:1 in sequence, all of one size: 8 samples in each step.
    of = np.repeat([0, 0, 1, 2], 40)
    step_of = np.repeat(np.arange(20), 8)
    after = spread((np.arange(160), step_of, np.zeros(160, int), of, 3))
    counts = np.stack([np.bincount(step_of[of[after] == kind], minlength=20) for kind in range(3)])
    assert (counts == [[4], [2], [2]]).all()


@given(levelled())
def test_the_fullest_group_with_room(case) -> None:
    sizes, budgets, groups = case
    order = np.argsort(-sizes.sum(1), kind="stable")
    group_of = np.full(len(sizes), -2)
    spilled = fill(sizes, order, budgets, groups, group_of, 0)
    loads = np.zeros((groups, sizes.shape[1]))
    known = np.isfinite(budgets)
    for sample in order:
        fitting = [g for g in range(groups) if (loads[g] + sizes[sample] <= budgets).all()]
        if not fitting:
            assert group_of[sample] == -1
            continue
        room = [((budgets - load)[known] / budgets[known]).sum() for load in loads]
        assert room[group_of[sample]] <= min(room[g] for g in fitting) + 1e-9
        loads[group_of[sample]] += sizes[sample]
    assert spilled == (group_of == -1).sum()


@given(levelled(), st.booleans())
def test_space_is_made_by_moving_one_sample(case, filled) -> None:
    sizes, budgets, groups = case
    order = np.argsort(-sizes.sum(1), kind="stable")
    group_of = np.full(len(sizes), -2)
    if filled:
        fill(sizes, order, budgets, groups, group_of, 0)
    else:
        level(sizes, order, budgets, groups, group_of, np.zeros((0, sizes.shape[1])))
    placed = group_of >= 0
    spilled = make_room(sizes, order, budgets, groups, group_of, 0)
    assert (group_of[placed] >= 0).all() and spilled == (group_of < 0).sum()
    loads = np.array([sizes[group_of == g].sum(0) for g in range(groups)])
    assert (loads <= budgets).all()
    # The last one that was left out would have a group if it were possible.
    left = [sample for sample in order if group_of[sample] < 0]
    for sample in left[-1:]:
        for other in np.flatnonzero(group_of >= 0):
            here = group_of[other]
            if (loads[here] - sizes[other] + sizes[sample] <= budgets).all():
                elsewhere = [g for g in range(groups) if g != here]
                assert not any((loads[g] + sizes[other] <= budgets).all() for g in elsewhere)


@given(levelled(), st.integers(1, 8))
def test_large_samples_stay_in_their_groups(case, first) -> None:
    sizes, budgets, groups = case
    order = np.argsort(-sizes.sum(1), kind="stable")
    first = min(first, groups, len(order))
    group_of = np.full(len(sizes), -2)
    extra = np.zeros((first, sizes.shape[1]))
    for assign in (level, fill):
        assign(sizes, order, budgets, groups, group_of, extra if assign is level else first)
        make_room(sizes, order, budgets, groups, group_of, first)
        assert group_of[order[:first]].tolist() == list(range(first))


def plain_make_room(sizes, order, budgets, groups, group_of):
    """Run :func:`make_room`, but search all groups again for every sample."""
    room = np.tile(budgets, (groups, 1)).astype(float)
    for sample in order[group_of[order] >= 0]:
        room[group_of[sample]] -= sizes[sample]
    spilled = 0
    for sample in order[group_of[order] < 0]:
        for other in order[::-1]:
            group = group_of[other]
            if group < 0 or (room[group] + sizes[other] < sizes[sample]).any():
                continue
            fits = [g for g in range(groups) if g != group and (room[g] >= sizes[other]).all()]
            if fits:
                to = min(fits, key=lambda g: sum(room[g] / budgets))
                room[group] += sizes[other] - sizes[sample]
                room[to] -= sizes[other]
                group_of[other], group_of[sample] = to, group
                break
        else:
            spilled += 1
    return spilled


@pytest.mark.parametrize("seed", range(20))
def test_making_space_equals_a_full_search(seed):
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 30, (40, 2)).astype(float)
    order = np.argsort(-sizes.sum(1), kind="stable")
    groups = int(random.integers(3, 8))
    budgets = sizes.sum(0) / groups * random.uniform(0.95, 1.1)
    group_of = np.full(40, -1)
    level(sizes, order, budgets, groups, group_of, np.zeros((0, 2)))
    plain = group_of.copy()
    assert make_room(sizes, order, budgets, groups, group_of, 0) == plain_make_room(
        sizes, order, budgets, groups, plain
    )
    assert (group_of == plain).all()
