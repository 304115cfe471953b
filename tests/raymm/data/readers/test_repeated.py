"""Sources whose samples are used more or less often than once per epoch."""

import json
import pickle
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.data import local_steps, open_split, training_sampler
from raymm.data.readers import JsonDataset, Repeated
from raymm.data.sampling.sampler import flat
from raymm.data.sampling.scan_cache import scan_key
from raymm.errors import DataError


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "d.jsonl"
    rows = [{"id": f"s{i}", "text": f"row {i}", "images": ["a.png"] * (i % 3)} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonDataset(path, {"vision": "images"})


@given(st.floats(0.02, 5), st.integers(0, 99))
def test_every_sample_is_used_as_often_as_configured(reader, repeat, seed):
    repeated = Repeated(reader, repeat, seed)
    assert abs(len(repeated) - repeat * 30) <= 0.5
    found = np.bincount(repeated.rows, minlength=30)
    assert found.sum() == len(repeated) and found.max() - found.min() <= 1
    assert np.array_equal(repeated.rows, Repeated(reader, repeat, seed).rows)


def test_samples_are_those_of_the_reader(reader):
    repeated = pickle.loads(pickle.dumps(Repeated(reader, 1.5, 3)))
    assert len(repeated) == 45
    for index, row in enumerate(repeated.rows.tolist()):
        sample = repeated[index]
        assert (sample.index, sample.id) == (index, f"s{row}")
        assert repeated.counts["vision"][index] == row % 3
    assert repeated[-1].id == repeated[44].id and repeated[-1].index == 44
    for index in (45, -46):
        with pytest.raises(IndexError):
            repeated[index]
    assert (repeated.name, repeated.names) == (reader.name, reader.names)
    assert repeated.sources.shape == (45,)


def test_seed_and_source_name_select_the_part(reader):
    parts = [tuple(Repeated(reader, 0.5, seed).rows) for seed in range(4)]
    assert len(set(parts)) == 4 and all(list(part) == sorted(part) for part in parts)
    assert Repeated(reader, 2, 0).rows.tolist() == [*range(30), *range(30)]


def test_a_source_without_samples_is_refused(reader):
    with pytest.raises(DataError, match=r"repeat 0.01 of source 'd' leaves none of its 30"):
        Repeated(reader, 0.01)


def two_sources(tmp_path, *repeats):
    folder = tmp_path / "train.jsonl"
    other = tmp_path / "other.jsonl"
    other.write_text(folder.read_text().replace('"id": "s', '"id": "t'))
    return [
        {"path": str(path), "name": name, "repeat": repeat}
        for path, name, repeat in zip((folder, other), "st", repeats, strict=True)
    ]


def configure(make_config, tmp_path, *repeats, **fields):
    config = make_config(12)
    sources = two_sources(tmp_path, *repeats)
    return type(config)(**(config.model_dump() | {"train": sources} | fields))


@pytest.mark.parametrize("method", ["random", "length_grouped"])
def test_an_epoch_has_the_mix(make_config, tmp_path, method):
    """Use 12 samples each: all of one twice, a quarter of the other."""
    batching = {"method": method}
    if method != "random":
        batching["cache"] = str(tmp_path / "scans")
    config = configure(make_config, tmp_path, 2, 0.25, batching=batching)
    dataset = open_split(config, "train")
    assert len(dataset) == 27 and dataset.names == ("s", "t")
    assert np.bincount(dataset.sources).tolist() == [24, 3]
    stream = (
        index for samples, _ in training_sampler(config, dataset).batches()
        for index in flat(samples)
    )
    taken = Counter(islice(stream, 27))
    assert taken == Counter(range(27))
    ids = Counter(dataset[i].id for i in taken)
    assert {name: ids[name] for name in ids if name[0] == "s"} == {f"s{i}": 2 for i in range(12)}
    assert sorted(ids.values()) == [1] * 3 + [2] * 12


def test_a_repeated_stream_resumes(make_config, tmp_path):
    config = configure(make_config, tmp_path, 1.5, 0.5)
    whole = list(local_steps(config, steps=9))
    rest = list(local_steps(config, start_state=whole[3].state_after, steps=5))
    assert [step.meta for step in rest] == [step.meta for step in whole[4:]]


def test_scans_are_cached_separately(make_config, tmp_path):
    """Use the same files with other samples, or the same number of others."""
    config = configure(make_config, tmp_path, 1, 1)

    def key(*repeats, seed=0):
        sources = [
            {**one.model_dump(), "repeat": repeat}
            for one, repeat in zip(config.train, repeats, strict=True)
        ]
        other = type(config)(**(config.model_dump() | {"train": sources, "seed": seed}))
        return scan_key(open_split(other, "train"), other)

    keys = [key(1, 1), key(1, 0.5), key(0.5, 1), key(1, 0.5, seed=1), key(2, 1)]
    assert len(set(keys)) == len(keys)
    assert key(1, 0.5) == keys[1] and key(1, 1, seed=1) == keys[0]
