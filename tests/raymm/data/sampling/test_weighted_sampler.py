"""Sources mixed by weights: each gives its share, and each of its samples once per pass."""

import zlib
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from raymm.data import DataConfig, local_steps, open_split, training_sampler
from raymm.data.sampling.batching import WeightedSampler
from raymm.errors import DataError

WEIGHT = st.one_of(st.just(0.0), st.floats(1e-6, 1e4))
SCHEDULE = st.dictionaries(st.integers(1, 30), WEIGHT, max_size=3)


@st.composite
def mixtures(draw):
    """Draw sizes, schedules, batch size, seed; one source's weight is never 0."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    schedules = [{0: draw(WEIGHT), **draw(SCHEDULE)} for _ in sizes]
    schedules[draw(st.integers(0, len(sizes) - 1))] = {0: draw(st.floats(1e-3, 10))}
    return sizes, schedules, draw(st.integers(1, 12)), draw(st.booleans()), draw(
        st.integers(0, 2**32)
    )


def sampler_of(sizes, schedules, batch_size, shuffle, seed):
    names = [f"s{number}" for number in range(len(sizes))]
    sources = np.repeat(np.arange(len(sizes)), sizes)
    return WeightedSampler(names, sources, schedules, batch_size, shuffle, seed)


def weight_at(schedule, step):
    """Return the weight of the last entry that is not after the step."""
    return [weight for first, weight in sorted(schedule.items()) if first <= step][-1]


def oracle(sizes, schedules, batch_size, shuffle, seed, steps):
    """Return every step as a list of (source, sample in it), slowly.

    Compares one random number with cumulative shares; every source is an endless list of passes.
    """
    def passes(source):
        epoch = 0
        while True:
            key = [seed, zlib.crc32(f"s{source}".encode()), epoch]
            order = np.random.default_rng(key).permutation(sizes[source]).tolist()
            yield from order if shuffle else range(sizes[source])
            epoch += 1

    streams = [passes(source) for source in range(len(sizes))]
    starts = np.cumsum([0, *sizes])
    for step in range(steps):
        weights = [weight_at(schedule, step) for schedule in schedules]
        offset = np.random.default_rng([seed, 1, step]).random()
        taken = []
        upper = 0.0
        for source, weight in enumerate(weights):
            lower, upper = upper, upper + weight
            # A source gets as many samples as there are integers above the offset in its interval.
            below = np.floor(lower / sum(weights) * batch_size + offset)
            above = np.floor(upper / sum(weights) * batch_size + offset)
            count = int(min(above, batch_size) - min(below, batch_size)) if source else int(above)
            taken += [int(starts[source]) + next(streams[source]) for _ in range(count)]
        order = np.random.default_rng([seed, 2, step]).permutation(len(taken))
        yield [taken[place] for place in order]


@settings(max_examples=60, deadline=None)
@given(mixtures())
def test_steps_are_the_oracles(mixture):
    steps = [indices for indices, _ in islice(sampler_of(*mixture).batches(), 40)]
    expected = list(oracle(*mixture, 40))
    assert steps == expected


@settings(max_examples=60, deadline=None)
@given(mixtures(), st.integers(0, 39))
def test_shares_passes_and_resumption(mixture, at):
    sizes, schedules, batch_size, _, _ = mixture
    taken = list(islice(sampler_of(*mixture).batches(), 40))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    streams = [[] for _ in sizes]
    for step, (indices, state) in enumerate(taken):
        assert len(indices) == batch_size and state["step"] == step + 1
        weights = np.array([weight_at(schedule, step) for schedule in schedules])
        shares = weights / weights.sum() * batch_size
        counts = np.bincount(owner[indices], minlength=len(sizes))
        assert (np.abs(counts - shares) < 1 + 1e-6).all()
        assert not counts[weights == 0].any()
    # The same steps follow from any state, in a new process or not.
    again = islice(sampler_of(*mixture).batches(taken[at][1]), 39 - at)
    assert list(again) == taken[at + 1 :]
    # A source's samples in order of use: whole passes.
    for indices, _ in taken:
        for index in indices:
            streams[owner[index]].append(index)
    for source, stream in enumerate(streams):
        times = Counter(stream)
        assert max(times.values(), default=0) - min(
            (times.get(i, 0) for i in np.flatnonzero(owner == source)), default=0
        ) <= 1
        assert taken[-1][1]["taken"][f"s{source}"] == len(stream)


def test_shares_are_exact_on_the_average():
    sampler = sampler_of([5, 7, 3], [{0: 0.7}, {0: 0.25}, {0: 0.05}], 3, True, 0)
    steps = 4000
    indices = [i for step, _ in islice(sampler.batches(), steps) for i in step]
    counts = np.bincount(np.repeat([0, 1, 2], [5, 7, 3])[indices])
    np.testing.assert_allclose(counts / (3 * steps), [0.7, 0.25, 0.05], atol=0.01)


def test_a_run_mixes_by_schedule_and_resumes_with_others(make_config, tmp_path):
    make_config()
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("a", lines[:12]), ("b", lines[12:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))

    def config(*weights, **changes):
        return make_config(train=[
            {"path": str(tmp_path / f"{name}.jsonl"), "weight": weight}
            for name, weight in zip("ab", weights, strict=True)
        ], **changes)

    mixed = config({0: 1, 4: 0}, 1.0)
    steps = list(local_steps(mixed, steps=6))
    ids = [[i for meta in step.meta for i in meta.sample_ids] for step in steps]
    of_a = [sum(int(i[1:]) < 12 for i in step) for step in ids]
    assert of_a == [3, 3, 3, 3, 0, 0]
    # Steps do not depend on microbatches; a new batch size continues from the same samples.
    other = list(local_steps(config({0: 1, 4: 0}, 1.0, microbatches=1), steps=6))
    for step, sample_ids in zip(other, ids, strict=True):
        assert sorted(i for meta in step.meta for i in meta.sample_ids) == sorted(sample_ids)
    state = steps[1].state_after
    assert state == {"step": 2, "taken": {"a": 6, "b": 6}}
    (larger,) = local_steps(
        config(1.0, 0.0, batch_size=12, microbatches=1), start_state=state, steps=1
    )
    assert larger.state_after == {"step": 3, "taken": {"a": 18, "b": 6}}
    taken = Counter(i for step in ids[:2] for i in step) + Counter(larger.meta[0].sample_ids)
    assert Counter(taken[f"s{i}"] for i in range(12)) == {1: 6, 2: 6}
    with pytest.raises(DataError, match="data.train has weights, but data position"):
        training_sampler(mixed, open_split(mixed, "train")).check({"epoch": 0, "position": 1})
    plain = make_config()
    with pytest.raises(DataError, match="data.train has no weights, but data position"):
        training_sampler(plain, open_split(plain, "train")).check(state)
    none = config({0: 1, 4: 0}, {0: 1, 5: 0})
    with pytest.raises(DataError, match="weights of all sources are 0 from step 5 on"):
        training_sampler(none, open_split(none, "train"))


@pytest.mark.parametrize(("changes", "reason"), [
    ({"train": [{"path": "a", "weight": 1}, "b"]}, "'b' has no weight, but other sources have one"),
    ({"train": [{"path": "a", "weight": 1, "repeat": 2}]}, "repeat 2; accepted: one of them"),
    ({"train": [{"path": "a", "weight": {5: 1}}]}, "weight from step 0 on"),
    ({"train": [{"path": "a", "weight": -1}]}, "greater than or equal to 0"),
    ({"train": [{"path": "a", "weight": {-1: 1}}]}, "greater than or equal to 0"),
    ({"train": [{"path": "a", "weight": float("nan")}]}, "finite number"),
    ({"train": "a", "heldout": [{"path": "a", "weight": 1}]}, "held-out data is one pass"),
    ({"train": [{"path": "a", "weight": 1}], "batching": "balanced"}, "batching is 'balanced'"),
])
def test_invalid_weights_are_refused(changes, reason):
    with pytest.raises(ValidationError, match=reason):
        DataConfig(tokenizer="t", batch_size=4, microbatches=2, **changes)
