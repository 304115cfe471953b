from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.data import EpochSampler
from raymm.data.sampling.sampler import group_by_modality, split_evenly
from raymm.errors import DataError

SIZES = {"length": st.integers(1, 40), "batch": st.integers(1, 50), "seed": st.integers(0, 9)}


@given(**SIZES, shuffle=st.booleans())
def test_every_epoch_has_every_sample_once(length, batch, seed, shuffle):
    sampler = EpochSampler(length, batch, shuffle, seed)
    steps = -(-3 * length // batch)
    stream = [i for indices, _ in islice(sampler.batches(), steps) for i in indices]
    assert len(stream) == steps * batch
    for epoch in range(3):
        part = stream[epoch * length : (epoch + 1) * length]
        assert sorted(part) == list(range(length))


@given(**SIZES, done=st.integers(0, 12))
def test_a_state_resumes_the_same_stream(length, batch, seed, done):
    sampler = EpochSampler(length, batch, True, seed)
    whole = list(islice(sampler.batches(), done + 5))
    state = whole[done - 1][1] if done else None
    assert list(islice(sampler.batches(state), 5)) == whole[done:]


@given(**SIZES)
def test_one_pass_ends_with_the_epoch(length, batch, seed):
    sampler = EpochSampler(length, batch, True, seed)
    steps = list(sampler.one_pass())
    assert Counter(i for indices, _ in steps for i in indices) == Counter(range(length))
    assert all(len(indices) == batch for indices, _ in steps[:-1])
    assert steps[-1][1] == {"epoch": 1, "position": 0}


def test_epochs_and_seeds_differ():
    orders = [tuple(EpochSampler(20, 4, True, s).order(e)) for s in (0, 1) for e in (0, 1)]
    assert len(set(orders)) == 4


@pytest.mark.parametrize("state", [{"epoch": 0}, {"epoch": 0, "position": 9}, {"epoch": -1}])
def test_states_that_do_not_fit(state):
    with pytest.raises(DataError, match="position"):
        EpochSampler(9, 2).check(state)


def test_samples_of_a_kind_share_microbatches():
    counts = {"vision": np.array([0, 1, 0, 2, 0, 1]), "audio": np.array([0, 0, 1, 1, 0, 0])}
    order = group_by_modality([5, 4, 3, 2, 1, 0], counts)
    assert order == [3, 5, 1, 2, 4, 0]
    assert split_evenly(order, 3) == [[3, 5], [1, 2], [4, 0]]


@given(st.lists(st.integers()), st.integers(1, 9))
def test_split_evenly(samples, parts):
    split = split_evenly(samples, parts)
    assert [x for part in split for x in part] == samples
    assert len(split) == min(parts, len(samples))
    assert not split or max(map(len, split)) - min(map(len, split)) <= 1
