"""Planned groups step by step: every sample of an epoch once, wherever a run resumes."""

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.data.sampling.group_sampler import GroupSampler
from raymm.data.sampling.sampler import EpochSampler, flat
from raymm.errors import DataError
from raymm.scheduler.minibatch.problem import SampleSizes


def sizes_of(count: int, seed: int = 0) -> SampleSizes:
    rng = np.random.default_rng(seed)
    values = np.stack([rng.integers(0, 5, count), rng.integers(5, 60, count)], axis=1)
    return SampleSizes(("vision", "text"), values, rng.integers(0, 2, count))


def epoch_of(sampler: GroupSampler, state=None) -> list:
    """Return the steps up to the end of the state's epoch."""
    epoch, found = sampler.check(state)[0], []
    for groups, after in sampler.batches(state):
        found.append((groups, after))
        if after["epoch"] > epoch:
            return found


@given(
    st.integers(1, 60), st.integers(1, 5), st.sampled_from(["balanced", "random", "length_grouped"])
)
def test_every_sample_once_an_epoch_and_epochs_differ(count, groups, method):
    sampler = GroupSampler(sizes_of(count), groups, 3, method)
    orders = []
    state = None
    for epoch in range(2):
        steps = epoch_of(sampler, state)
        orders.append([sample for step, _ in steps for sample in flat(step)])
        assert sorted(orders[-1]) == list(range(count))
        assert all(1 <= len(step) <= groups and all(step) for step, _ in steps)
        state = steps[-1][1]
        assert state == {"epoch": epoch + 1, "sizes": sampler.digest, "taken": []}
        assert json.loads(json.dumps(steps[0][1])) == steps[0][1]
    assert count < 20 or orders[0] != orders[1]


@given(st.integers(12, 60), st.integers(1, 4), st.integers(0, 30))
def test_resuming_equals_an_uninterrupted_epoch(count, groups, stop):
    sampler = GroupSampler(sizes_of(count), groups, 2)
    whole = list(islice(sampler.batches(), stop + 10))
    state = whole[stop - 1][1] if stop else None
    again = GroupSampler(sizes_of(count), groups, 2)
    assert list(islice(again.batches(state), 10)) == whole[stop:]


PLANNERS = st.tuples(
    st.integers(1, 6), st.integers(1, 4), st.sampled_from(["balanced", "length_grouped"])
)


@given(st.integers(20, 80), st.lists(st.tuples(PLANNERS, st.integers(0, 3)), max_size=4))
def test_other_groups_take_the_remaining_samples(count, runs):
    """Interrupt repeatedly, and resume with other group counts, group sizes or methods."""
    seen: list[int] = []
    state = None
    for planner, steps in runs:
        sampler = GroupSampler(sizes_of(count), *planner)
        for step, after in islice(sampler.batches(state), steps):
            seen += flat(step)
            state = json.loads(json.dumps(after))
            if state["epoch"]:
                break
        if state is not None and state["epoch"]:
            break
    else:
        last = GroupSampler(sizes_of(count), 3, 2, source_weight=0.5)
        for step, _ in epoch_of(last, state):
            seen += flat(step)
    assert sorted(seen) == list(range(count))


def test_groups_of_a_step_have_similar_costs():
    """Compare with a random permutation, which does not achieve that."""
    sizes = sizes_of(400)
    spread = {}
    for method in ("balanced", "random"):
        steps = epoch_of(GroupSampler(sizes, 4, 4, method))
        full = [step for step, _ in steps if len(step) == 4]
        totals = np.array([[sizes.values[group, 1].sum() for group in step] for step in full])
        spread[method] = float((totals.max(1) / totals.mean(1)).mean())
    assert spread["balanced"] < 1.05 < 1.2 < spread["random"]


def taken(steps=1, **changes):
    one = {"method": "balanced", "groups": 2, "samples": 4, "seed": 0, "options": {}}
    return {**one, "steps": steps, **changes}


def position(*entries, epoch=0, **changes):
    return {"epoch": epoch, "sizes": GroupSampler(sizes_of(30), 2, 4).digest,
            "taken": list(entries), **changes}  # fmt: skip


@pytest.mark.parametrize(
    "state",
    [
        position(epoch=-1), position(taken()) | {"sizes": "0"}, position(taken(groups=0)),
        position(taken(10**6)), position(taken(10**6, groups=3)), position(3),
        position(taken(method="best")), position(taken(options={"ranks": 1})),
        {"epoch": 0, "taken": []}, {},
    ],
)
def test_invalid_positions(state):
    with pytest.raises(DataError, match="data position .* does not fit these 30 samples"):
        next(GroupSampler(sizes_of(30), 2, 4).batches(state))


def test_a_position_of_random_steps_is_refused_by_name():
    with pytest.raises(DataError, match="data.batching is 'balanced', but .* 'random'"):
        next(GroupSampler(sizes_of(30), 2, 4).batches({"epoch": 0, "position": 3}))
    with pytest.raises(DataError, match="data.batching is 'random', but .* planned"):
        EpochSampler(30, 8).check(position(taken()))


def test_other_samples_do_not_matter_between_epochs():
    """Check that only the samples taken in an epoch must be the same."""
    groups, after = next(GroupSampler(sizes_of(40), 2, 4).batches(position(epoch=1)))
    assert len(groups) == 2 and after["epoch"] == 1
