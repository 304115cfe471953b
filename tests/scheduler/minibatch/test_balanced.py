"""Plans of every method keep their guarantees; the default also its balance."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared.drawn_sizes import DISTRIBUTIONS, drawn_sizes
from benchmarks.shared.isf import plan_isf
from raymm.errors import PlanError
from raymm.scheduler.minibatch.balanced import WAVE_STEPS, _waves, plan_balanced
from raymm.scheduler.minibatch.budgets import least_groups
from raymm.scheduler.minibatch.methods import (
    METHODS,
    plan_length_grouped,
    plan_minibatches,
    plan_random,
)
from raymm.scheduler.minibatch.metrics import balance, loads, mixing
from raymm.scheduler.minibatch.problem import MiniBatchPlan, SampleSizes
from tests.support.minibatch_data import groups_of, real, sizes


def check(plan: MiniBatchPlan, of: SampleSizes) -> None:
    """Check that every sample is in one group, or left out, and no group exceeds a budget."""
    groups = groups_of(plan)
    assert plan.groups == len(groups) * plan.ranks
    taken = list(itertools.chain(*itertools.chain(*groups)))
    assert sorted(taken + plan.left_out.tolist()) == list(range(len(of)))
    assert plan.left_out.tolist() == sorted(plan.left_out.tolist())
    for group in itertools.chain(*groups):
        for column in range(len(of.names)):
            used = sum(int(of.values[sample, column]) for sample in group)
            assert plan.budgets is None or used <= plan.budgets[column]


@st.composite
def cases(draw: st.DrawFn) -> tuple[SampleSizes, int, tuple[int, ...] | None]:
    of = draw(sizes())
    ranks = draw(st.integers(1, min(len(of), 9)))
    largest = np.maximum(of.values.max(0), 1).tolist()
    budgets = draw(st.none() | st.tuples(
        *[st.integers(most, most * 5) for most in largest]
    ))
    return of, ranks, budgets


@given(cases(), st.sampled_from([0.0, 0.02, 1.0]), st.sampled_from([0.0, 0.3]))
def test_balanced_takes_every_sample_once_within_the_budgets(case, alike, weight) -> None:
    of, ranks, budgets = case
    plan = plan_balanced(of, ranks, budgets, alike=alike, source_weight=weight)
    check(plan, of)
    assert len(plan.left_out) == 0
    assert plan.groups >= least_groups(of, plan.budgets)
    counts = [len(group) for step in groups_of(plan) for group in step]
    assert min(counts) > 0 or plan.groups > len(of)


@given(cases(), st.integers(0, 3))
def test_the_same_seed_and_epoch_make_the_same_plan(case, epoch) -> None:
    of, ranks, budgets = case
    one, other = (plan_balanced(of, ranks, budgets, seed=7, epoch=epoch) for _ in range(2))
    assert groups_of(one) == groups_of(other)


@given(sizes(least=8), st.integers(1, 4), st.integers(1, 2), st.booleans())
def test_baselines_leave_out_less_than_a_step(of, ranks, batch, sharded) -> None:
    for plan in (
        plan_random(of, ranks, batch, sharded=sharded, epoch=3),
        plan_length_grouped(of, ranks, batch, epoch=3),
    ):
        check(plan, of)
        assert {len(group) for step in groups_of(plan) for group in step} == {batch}
        assert len(plan.left_out) < ranks * batch


def test_length_grouped_begins_with_the_longest_sample() -> None:
    of = real("chartqa")
    plan = plan_length_grouped(of, 8)
    assert of.values[plan.group(0, 0)[0], 1] == of.values[:, 1].max()


def test_sharded_ranks_keep_to_their_part_of_the_data() -> None:
    of = real("ai2d")
    plan = plan_random(of, 8, sharded=True)
    part = plan.steps * 4
    for rank in range(8):
        mine = np.concatenate([plan.group(step, rank) for step in range(plan.steps)])
        assert sorted(mine.tolist()) == list(range(rank * part, (rank + 1) * part))


@pytest.mark.parametrize("name", ["ai2d", "chartqa", "both"])
@pytest.mark.parametrize("ranks", [8, 64])
def test_balance_of_real_data(name: str, ranks: int) -> None:
    of = real(name)
    plan = plan_balanced(of, ranks)
    check(plan, of)
    found = balance(plan, of)
    assert found.left_out == 0 and found.pad == {"text": 0.0}
    # Fewer, fuller groups differ more; the saved steps are worth more.
    assert found.dist["vision"] <= 0.003
    assert found.dist["text"] <= 0.005
    assert found.efficiency >= 0.998
    assert plan.groups <= 1.05 * least_groups(of, plan.budgets)
    assert 3.5 < found.average_batch < 5


@pytest.mark.parametrize("ranks", [8, 64])
def test_mixing_of_two_data_sets_and_its_knob(ranks: int) -> None:
    of = real("both")
    found = {
        alike: balance(plan_balanced(of, ranks, alike=alike), of) for alike in (0.0, 0.02, 1.0)
    }
    assert found[0.0].mixing > found[0.02].mixing > found[1.0].mixing
    assert found[0.0].efficiency > found[0.02].efficiency > found[1.0].efficiency
    # Steps of groups of all sizes mix better than random ones.
    assert found[1.0].mixing < found[1.0].random_mixing
    default = balance(plan_balanced(of, ranks), of)
    assert default.mixing < 1.3 * default.random_mixing
    ignoring = plan_balanced(of, ranks, source_weight=0.0)
    assert default.mixing < mixing(ignoring, of.sources)


def test_epochs_differ_in_groups_and_in_their_order() -> None:
    of = real("ai2d")
    plans = [plan_balanced(of, 8, epoch=epoch) for epoch in range(2)]
    sets = [
        {frozenset(group) for step in groups_of(plan) for group in step} for plan in plans
    ]
    assert len(sets[0] & sets[1]) < 0.01 * len(sets[0])
    # Samples of one rank's first half of an epoch are spread over the next epoch.
    first = [set(plan.samples[: len(of) // 2].tolist()) for plan in plans]
    assert abs(len(first[0] & first[1]) / len(first[0]) - 0.5) < 0.05


def test_heavy_steps_come_anywhere_in_the_epoch() -> None:
    of = real("chartqa")
    plan = plan_balanced(of, 8)
    tokens = loads(plan, of)[:, :, 1].sum(1)
    place = np.arange(plan.steps)
    assert abs(np.corrcoef(place, tokens)[0, 1]) < 0.15


def test_samples_above_half_of_the_budget_need_a_group_each() -> None:
    of = SampleSizes(("text",), np.full((100, 1), 51))
    plan = plan_balanced(of, 8, (100,))
    check(plan, of)
    assert plan.groups == 104 and least_groups(of, (100,)) == 100
    counts = [len(group) for step in groups_of(plan) for group in step]
    assert sorted(counts) == [0] * 4 + [1] * 100


def test_text_only_samples_are_levelled_with_images() -> None:
    # Two kinds of samples without a common modality, which a sum of both could not distinguish.
    values = np.array([[8, 0]] * 256 + [[0, 2000]] * 512)
    of = SampleSizes(("vision", "text"), values)
    plan = plan_balanced(of, 8, (16, 8000))
    assert plan.groups == 128
    assert (loads(plan, of) == [16, 8000]).all()


def _bad(**change: object) -> Callable[[], object]:
    of = SampleSizes(("vision", "text"), np.array([[1, 10], [2, 20], [3, 30]]))
    arguments = {"sizes": of, "ranks": 2, **change}
    return lambda: plan_minibatches(**arguments)


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (_bad(ranks=0), "ranks must be at least 1, got 0"),
        (_bad(ranks=4), "4 ranks need a sample each; there are only 3 samples"),
        (_bad(method="best"), "method must be one of"),
        (_bad(budgets=(2, 30)), "sample 2 has 3 units of vision, above the budget of 2"),
        (_bad(budgets=(3,)), "budgets must be 2"),
        (_bad(budgets=(3, 0)), "the budget of text must be at least 1, got 0"),
        (_bad(alike=1.5), "alike must be from 0 to 1, got 1.5"),
        (_bad(source_weight=-1), "source_weight must not be negative"),
        (_bad(samples_per_group=0.5), "samples_per_group must be at least 1"),
        (_bad(seed=-1), "seed and epoch must not be negative"),
        (_bad(method="random", batch=0), "batch must be at least 1"),
        (_bad(method="random", batch=4), "3 samples are fewer than 2 ranks with 4 each"),
        (lambda: SampleSizes(("a",), np.zeros((2, 2), int)), "one column for each"),
        (lambda: SampleSizes(("a", "a"), np.zeros((2, 2), int)), "names must differ"),
        (lambda: SampleSizes(("a",), np.zeros((2, 1))), "must be integers, got float64"),
        (lambda: SampleSizes(("a",), np.array([[1], [-2]])), "got -2 for sample 1, a"),
        (lambda: SampleSizes(("a",), np.ones((2, 1), int), np.zeros(3, int)), "sources"),
        (lambda: SampleSizes(("a",), np.ones((2, 1), int), padded=("b",)), "padded"),
    ],
)
def test_unplannable_samples_are_named(run: Callable[[], object], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        run()


def test_every_method_has_its_name() -> None:
    of = real("ai2d")
    for method in METHODS:
        plan = plan_minibatches(of, 8, method, seed=1, epoch=2)
        assert (plan.method, plan.seed, plan.epoch) == (method, 1, 2)
        check(plan, of)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=400), st.integers(0, 9))
def test_consecutive_steps_take_similar_times(slowest, seed) -> None:
    slowest = np.array(slowest, float)
    order = _waves(slowest, np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(len(slowest)))
    if len(slowest) < 2 * WAVE_STEPS:  # one wave: neighbours are at most two positions apart
        place = np.empty(len(slowest), int)
        place[np.lexsort([np.zeros(len(slowest)), slowest])] = np.arange(len(slowest))
        ranked = np.sort(slowest)
        jumps = np.abs(np.diff(slowest[order]))
        allowed = ranked[2:] - ranked[:-2] if len(ranked) > 2 else np.ptp(ranked)
        assert jumps.max(initial=0.0) <= np.max(allowed, initial=np.ptp(ranked[:2]))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("ranks", [8, 64])
def test_drawn_sizes_are_planned_at_least_as_well_as_isf(name: str, ranks: int) -> None:
    sizes = drawn_sizes(name, 8000, 3)
    plan = plan_balanced(sizes, ranks)
    assert plan.steps <= 1.1 * -(-least_groups(sizes, plan.budgets) // ranks) + 1
    isf = plan_isf(sizes, ranks, plan.budgets, iterations=50)
    ours, theirs = balance(plan, sizes), balance(isf, sizes)
    assert ours.step_efficiency > theirs.step_efficiency
    assert ours.efficiency > theirs.efficiency


@pytest.mark.parametrize(("ranks", "least"), [(8, 0.997), (64, 0.989), (256, 0.993)])
def test_steps_with_large_samples_are_filled_up_to_them(ranks: int, least: float) -> None:
    sizes = drawn_sizes("documents", 30_000, 0)
    plan = plan_balanced(sizes, ranks)
    check(plan, sizes)
    assert balance(plan, sizes).efficiency >= least
    assert plan.steps <= 1.02 * -(-least_groups(sizes, plan.budgets) // ranks) + 1
