"""Every format gives the same samples, and its errors name the location."""

import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raymm.data import StepBuilder, local_steps, open_source, open_split
from raymm.data.readers import ParquetDataset, ReaderOptions, TarDataset
from raymm.data.samples.headers import Limits
from raymm.errors import ConfigError, DataError, SampleError
from tests.support.same_rows import write_datasets_folder, write_parquet, write_shards
from tests.support.sample_files import write_rows

WRITERS = {
    "parquet": lambda folder: write_parquet(folder, 20),
    "parquet-paths": lambda folder: write_parquet(folder, 20, embedded=False),
    "tar": lambda folder: write_shards(folder, 20),
    "datasets": lambda folder: write_datasets_folder(folder, 20),
    "datasets-paths": lambda folder: write_datasets_folder(folder, 20, embedded=False),
}


def source(format, path):
    # A shard's columns are extensions.
    columns = {"vision": "*.png", "audio": "wav"} if format == "tar" else {}
    return {"path": str(path), "columns": columns}


@pytest.mark.parametrize("format", WRITERS)
def test_every_format_gives_the_same_steps(make_config, tmp_path, format):
    config = make_config(max_length=60)
    path = WRITERS[format](tmp_path)
    folders = [str(tmp_path)] if format.endswith("paths") else []
    other = make_config(train=source(format, path), max_length=60, media_folders=folders)
    dataset = open_split(other, "train")
    reference = open_split(config, "train")
    for name in ("vision", "audio"):
        assert dataset.counts[name].tolist() == reference.counts[name].tolist()
    assert [dataset[i].id for i in range(20)] == [reference[i].id for i in range(20)]
    for got, want in zip(local_steps(other, steps=4), local_steps(config, steps=4), strict=True):
        assert got.meta == want.meta
        torch.testing.assert_close(got.microbatches, want.microbatches, rtol=0, atol=0)


@pytest.mark.parametrize("format", WRITERS)
def test_readers_are_pickled_without_their_rows(make_config, tmp_path, format):
    train = source(format, WRITERS[format](tmp_path))
    dataset = open_split(make_config(train=train, media_folders=[str(tmp_path)]), "train")
    before = dataset[3]
    packed = pickle.dumps(dataset)
    assert len(packed) < 6000
    assert pickle.loads(packed)[3] == before
    assert dataset[-1].index == 19
    with pytest.raises(IndexError):
        dataset[20]


def test_sources_in_one_run_keep_their_names(make_config, tmp_path):
    sources = [
        str(tmp_path / "train.jsonl"),
        source("tar", write_shards(tmp_path, 10)) | {"name": "shards"},
        source("parquet", write_parquet(tmp_path, 10)),
    ]
    config = make_config(train=sources)
    dataset = open_split(config, "train")
    assert dataset.names == ("train", "shards", "parquet") and len(dataset) == 40
    assert np.bincount(dataset.sources).tolist() == [20, 10, 10]
    assert [dataset[i].source for i in (0, 19, 20, 39)] == ["train", "train", "shards", "parquet"]
    assert [dataset[i].index for i in (0, 20, 39)] == [0, 20, 39]
    assert [dataset.counts["vision"][i] for i in (4, 24, 34)] == [2, 2, 2]
    built = StepBuilder(config, dataset).build([1, 21, 31])
    pixels = [mb["vision"]["pixel_values"] for mb in built.microbatches]
    assert torch.equal(torch.cat(pixels), pixels[0][:1].expand(3, -1, -1, -1))
    assert len(pickle.dumps(dataset)) < 12000


def test_columns_of_other_names_and_sources_without_a_modality(make_config, tmp_path):
    rows = [{"key": 5, "caption": "a cat", "picture": "i.png"}]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"text": "caption", "id": "key", "vision": "picture", "audio": None}
    config = make_config(
        train=[str(tmp_path / "train.jsonl"),
               {"path": str(tmp_path / "other.jsonl"), "columns": columns}]
    )
    dataset = open_split(config, "train")
    last = dataset[20]
    assert (last.id, last.text, last.source) == ("5", "a cat", "other")
    assert last.media == {"vision": (str(tmp_path / "i.png"),)}
    assert dataset.counts["audio"][20] == 0 and last.place.endswith("other.jsonl:1")


@pytest.mark.parametrize(
    ("name", "reader"), [("x.parquet", ParquetDataset), ("x.tar", TarDataset)]
)
def test_files_of_other_formats_are_refused(tmp_path, name, reader):
    (tmp_path / name).write_bytes(b"not this format" * 100)
    with pytest.raises(DataError, match=name):
        reader(tmp_path / name)
    with pytest.raises(DataError, match="nowhere.*does not exist"):
        reader(tmp_path / ("nowhere" + name))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty' has no"):
        reader(tmp_path / "empty")


def test_cyclic_links_are_refused(tmp_path):
    (circle := tmp_path / "rows.jsonl").symlink_to(circle)
    for source in (circle, circle / "train"):
        with pytest.raises(DataError, match=f"'{source}' (cannot be read|does not exist)"):
            open_source(source)


def test_truncated_files_are_refused(tmp_path):
    whole = write_shards(tmp_path, 20) / "000.tar"
    content = whole.read_bytes()
    for size in (len(content) // 2, len(content) // 2 + 700):
        (tmp_path / "cut.tar").write_bytes(content[:size])
        with pytest.raises(DataError, match="cut.tar"):
            TarDataset(tmp_path / "cut.tar")
    table = write_parquet(tmp_path, 20) / "a.parquet"
    (tmp_path / "cut.parquet").write_bytes(table.read_bytes()[:-20])
    with pytest.raises(DataError, match="cut.parquet"):
        ParquetDataset(tmp_path / "cut.parquet")


@pytest.mark.parametrize(("name", "kind"), [("pyarrow", "parquet"), ("datasets", "datasets")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, name, kind):
    path = WRITERS[kind](tmp_path)
    for module in (name, f"{name}.parquet"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    message = rf"needs the package {name}.*raymm\[{kind}\]"
    with pytest.raises((DataError, ConfigError), match=message):
        open_source(path)


def test_formats_follow_the_suffix_or_the_setting(tmp_path):
    write_rows(tmp_path, 3)
    (tmp_path / "train.jsonl").rename(tmp_path / "rows.txt")
    assert len(open_source(tmp_path / "rows.txt")) == 3
    assert len(open_source(write_shards(tmp_path, 4))) == 4
    assert len(open_source(tmp_path / "shards" / "*.tar")) == 4
    with pytest.raises(DataError, match=r"rows.txt.*Parquet"):
        open_source(tmp_path / "rows.txt", "parquet")
    with pytest.raises(DataError, match=r"format must be one of .*'tar'.*got 'csv'"):
        open_source(tmp_path / "rows.txt", "csv")
    write_parquet(tmp_path, 4)
    with pytest.raises(DataError, match=r"\['json', 'parquet', 'tar'\]; set 'format'"):
        open_source(tmp_path)


def test_malformed_json_rows_are_kept_and_refused_when_read(make_config, tmp_path):
    config = make_config(count=6, on_error="skip")
    with open(tmp_path / "train.jsonl", "a") as file:
        file.write('{"id": "nothing"}\nno json\n{"id": "n", "text": "a cat", "images": [5]}\n')
    dataset = open_split(config, "train")
    assert len(dataset) == 9 and dataset.counts["vision"].tolist()[6:] == [0, 0, 0]
    built = StepBuilder(config, dataset).build([1, 6, 7, 8])
    assert [meta.sample_ids for meta in built.meta] == [("s1",)]
    places = [f"{tmp_path / 'train.jsonl'}:{line}" for line in (7, 8, 9)]
    assert [(one.id, one.column, one.source) for one in built.skipped] == [
        (places[0], None, "train"), (places[1], None, "train"), (places[2], "images", "train"),
    ]
    assert pickle.loads(pickle.dumps(dataset)).counts.keys() == dataset.counts.keys()
    limits = Limits(max_item_bytes=1)
    reader = open_source(tmp_path / "train.jsonl", None, ReaderOptions(skip=True, limits=limits))
    with pytest.raises(SampleError, match="the line is not JSON"):
        reader[7]


@pytest.mark.parametrize("name", ["d.json", "d.jsonl"])
def test_json_that_is_nested_too_deep(tmp_path, name):
    (tmp_path / name).write_text("[" * 100_000 if name == "d.json" else '{"text":' + "[" * 100_000)
    with pytest.raises(DataError, match=f"{name}.*recursion"):
        open_source(tmp_path / name)


def test_lists_of_parts_in_parquet_equal_json(tmp_path):
    part = {"type": "image", "text": None}
    turns = [{"role": "user", "content": [part, {"type": "text", "text": "hi"}]},
             {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]
    pq.write_table(pa.table({"messages": [turns]}), tmp_path / "p.parquet")
    (tmp_path / "j.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    expected = [{**turns[0], "content": [{"type": "image"}, turns[0]["content"][1]]}, turns[1]]
    assert open_source(tmp_path / "p.parquet")[0].messages == expected
    assert open_source(tmp_path / "j.jsonl")[0].messages == expected
    # Sequence({...}) of datasets is a dict of lists.
    old = {"role": ["user", "assistant"], "content": ["hi", "yes"]}
    (tmp_path / "o.jsonl").write_text(json.dumps({"messages": old}) + "\n")
    assert [one["content"] for one in open_source(tmp_path / "o.jsonl")[0].messages] == [
        "hi", "yes",
    ]


def test_a_line_that_is_too_long_is_not_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr("raymm.data.readers.json_rows.MAX_LINE_BYTES", 40)
    rows = ['{"text": "a"}', json.dumps({"text": "b" * 300}), '{"text": "c"}']
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"d.jsonl:2: a line of 313 bytes, above 40"):
        open_source(tmp_path / "d.jsonl")
    dataset = open_source(tmp_path / "d.jsonl", None, ReaderOptions(skip=True))
    assert [dataset[0].text, dataset[2].text, len(dataset)] == ["a", "c", 3]
    with pytest.raises(SampleError, match="a line of 313 bytes"):
        dataset[1]
