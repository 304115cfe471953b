

import json
import pickle
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.data import local_steps, open_split, training_sampler
from raymm.data.readers import JsonDataset, ReaderOptions, Repeated
from raymm.data.sampling.sampler import flat
from raymm.data.sampling.scanner import scan_key
from raymm.errors import DataError

ROWS = [
    {"id": 7, "text": "né à Orléans", "images": "sub/a.png"},
    {"text": "日本", "images": ["/abs/b.png", "c.png"]},
    {"messages": [{"role": "user", "content": "hi [,]"}], "images": None},
]


def write(path, rows=ROWS, bom=""):
    if path.suffix == ".jsonl":
        body = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    else:
        body = "\n " + json.dumps(rows, ensure_ascii=False, indent=1) + "\n"
    path.write_text(bom + body, encoding="utf-8")
    return path


@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("name", ["d.jsonl", "d.json"])
def test_rows_are_found_by_offset(tmp_path, name, bom):
    options = ReaderOptions(media_folders=("/abs",))
    dataset = JsonDataset(write(tmp_path / name, bom=bom), {"vision": "images"}, options)
    dataset = pickle.loads(pickle.dumps(dataset))
    assert len(dataset) == 3
    assert dataset.counts["vision"].tolist() == [1, 2, 0]
    first, second, third = dataset[0], dataset[1], dataset[-1]
    assert (first.id, first.text) == ("7", "né à Orléans")
    assert first.media == {"vision": (str(tmp_path / "sub/a.png"),)}
    assert second.text == "日本"
    assert second.media == {"vision": ("/abs/b.png", str(tmp_path / "c.png"))}
    assert second.id.endswith("d.jsonl:3" if name == "d.jsonl" else "d.json[1]")
    assert third.messages == ROWS[2]["messages"] and third.media == {}
    with pytest.raises(IndexError):
        dataset[3]


def test_missing_file(tmp_path):
    with pytest.raises(DataError, match="nowhere.jsonl.*does not exist"):
        JsonDataset(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r":3: the line is not JSON"),
        ("[1]", r":3: a sample is a JSON object"),
        (
            '{"caption": "a"}',
            r":3: a sample needs 'messages' \(or .*'text'\); it has \['caption'\]",
        ),
        ('{"text": "a", "messages": []}', r":3: 'messages' must be a list with"),
        ('{"text": 5}', r":3: 'text' must be a string"),
        ('{"messages": [{"role": "user"}]}', r":3: messages\[0\] needs a string 'content'"),
        ('{"text": "a", "images": [3]}', r":3: column 'images' must be a path"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "ok", "images": null}\n\n' + line + "\n")
    with pytest.raises(DataError, match="d.jsonl" + message):
        JsonDataset(path, {"vision": "images"})


@pytest.mark.parametrize("body", ['[{"text": "a"} {"text": "b"}]', '[{"text": "a"}', '[{"text": '])
def test_torn_arrays(tmp_path, body):
    path = tmp_path / "d.json"
    path.write_text(body)
    with pytest.raises(DataError, match="d.json"):
        JsonDataset(path)


def test_no_samples(tmp_path):
    for body in ("", "[]", " [ ] "):
        path = tmp_path / "d.json"
        path.write_text(body)
        with pytest.raises(DataError, match="no samples"):
            JsonDataset(path)


def test_a_column_no_row_has_is_an_error_that_lists_the_columns(tmp_path):
    path = write(tmp_path / "d.jsonl")
    with pytest.raises(DataError, match=r"'image' \(modality 'vision'\).*'images', 'messages'"):
        JsonDataset(path, {"vision": "image"})


def test_a_file_changed_underneath(tmp_path):
    path = write(tmp_path / "d.jsonl")
    dataset = JsonDataset(path)
    path.write_text("{}\n" * 50)
    with pytest.raises(DataError, match="changed"):
        dataset[0]


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
