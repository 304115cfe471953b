"""Methods with a fixed number of samples per group: every sample once, and their errors."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.scheduler.minibatch.methods import plan_minibatches
from raymm.scheduler.minibatch.problem import SampleSizes


def sizes_of(lengths) -> SampleSizes:
    return SampleSizes(("text",), np.array(lengths, dtype=np.int64).reshape(-1, 1))


@pytest.mark.parametrize(("method", "options"), [
    ("random", {}), ("random", {"sharded": True}), ("length_grouped", {}),
])
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 40), st.integers(0, 9))
def test_each_sample_is_planned_once_or_left_out(
    method, options, ranks: int, batch: int, extra: int, seed: int
) -> None:
    sizes = sizes_of(np.random.default_rng(seed).integers(0, 50, ranks * batch + extra))
    plan = plan_minibatches(sizes, ranks, method, seed=seed, batch=batch, **options)
    used = Counter(plan.samples.tolist()) + Counter(plan.left_out.tolist())
    assert used == Counter(range(len(sizes)))
    assert len(plan.left_out) < ranks * batch
    assert all(
        len(plan.group(step, rank)) == batch for step in range(plan.steps) for rank in range(ranks)
    )


@given(st.lists(st.integers(0, 9), min_size=4, max_size=60), st.integers(0, 9))
def test_the_longest_sample_is_in_the_first_step(lengths, seed: int) -> None:
    plan = plan_minibatches(sizes_of(lengths), 2, "length_grouped", seed=seed, batch=2)
    assert lengths[plan.group(0, 0)[0]] == max(lengths)


def test_ranks_of_sharded_plans_keep_their_part_of_the_data() -> None:
    for epoch in range(3):
        options = {"epoch": epoch, "batch": 2, "sharded": True}
        plan = plan_minibatches(sizes_of(range(24)), 3, "random", **options)
        for rank in range(3):
            groups = [plan.group(step, rank) for step in range(plan.steps)]
            assert sorted(np.concatenate(groups)) == list(range(8 * rank, 8 * rank + 8))


@pytest.mark.parametrize(("method", "options", "message"), [
    ("sorted", {}, "method must be one of .'balanced', 'length_grouped', 'random'., got"),
    ("random", {"batch": 0}, "batch must be at least 1, got 0"),
    ("random", {"batch": 0, "sharded": True}, "batch must be at least 1, got 0"),
    ("random", {"batch": 4}, "5 samples are fewer than 2 ranks with 4 each"),
    ("length_grouped", {"batch": 0}, "batch must be at least 1, got 0"),
    ("length_grouped", {"modality": "audio"}, "modality must be one of .'text',., got 'audio'"),
])
def test_arguments_that_are_refused(method, options, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_minibatches(sizes_of(range(5)), 2, method, **options)
