"""Parquet files: columns of media, row groups, and files of different columns."""


import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raymm.data import open_source
from raymm.data.readers import ParquetDataset, ReaderOptions
from raymm.errors import DataError, SampleError
from tests.support.sample_files import write_image


def parquet(folder, table, **options):
    pq.write_table(pa.table(table), folder / "x.parquet", **options)
    return folder / "x.parquet"


def test_parquet_columns_of_paths_bytes_and_lists(tmp_path):
    write_image(tmp_path / "i.png", 0)
    data = (tmp_path / "i.png").read_bytes()
    path = parquet(
        tmp_path,
        {
            "text": ["a"] * 4,
            "path": ["i.png", "", None, str(tmp_path / "abs.png")],
            "paths": [["i.png"], [], None, ["a.png", "b.png"]],
            "bytes": [data, None, data, data],
            "lists": [[data], [data, data], None, []],
            "number": [1, 2, 3, 4],
        },
    )
    columns = {name: name for name in ("path", "paths", "bytes", "lists")}
    dataset = ParquetDataset(path, columns)
    assert {name: counts.tolist() for name, counts in dataset.counts.items()} == {
        "path": [1, 0, 0, 1], "paths": [1, 0, 0, 2], "bytes": [1, 0, 1, 1], "lists": [1, 2, 0, 0],
    }
    for row, sample in enumerate(dataset):
        assert {k: len(v) for k, v in sample.media.items()} == {
            k: int(v[row]) for k, v in dataset.counts.items() if v[row]
        }
    assert dataset[0].media["path"] == (str(tmp_path / "i.png"),)
    assert dataset[1].media["lists"][1].data == data
    assert dataset[1].place == f"{path}[1]" in dataset[1].media["lists"][1].name
    with pytest.raises(DataError, match="column 'number' is of type int64"):
        ParquetDataset(path, {"vision": "number"})
    with pytest.raises(DataError, match=r"column 'image' \(modality 'vision'\).*'lists'"):
        ParquetDataset(path, {"vision": "image"})


def test_only_used_columns_of_one_row_group_are_read(tmp_path, monkeypatch):
    big = [b"x" * 1000] * 40
    path = parquet(
        tmp_path, {"text": ["a"] * 40, "images": [["i.png"]] * 40, "big": big}, row_group_size=10
    )
    dataset = ParquetDataset(path, {"vision": "images"})
    read, iter_batches = [], pq.ParquetFile.iter_batches

    def spy(self, size, groups, columns):
        read.append((groups, columns))
        return iter_batches(self, size, groups, columns)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    for index in (12, 19, 15, 3):
        assert dataset[index].text == "a"
    assert read == [([1], ["text", "images"]), ([0], ["text", "images"])]


def test_rows_without_text_are_sample_errors_in_parquet(tmp_path):
    path = parquet(tmp_path, {"id": ["a", "b"], "text": ["x", None]})
    dataset = ParquetDataset(path)
    assert dataset[0].text == "x"
    with pytest.raises(SampleError, match=r"'b' \(.*x.parquet\[1\]\).*needs 'messages' \(or"):
        dataset[1]
    with pytest.raises(DataError, match=r"needs columns 'messages' \(or .*'text'\).*'caption'"):
        ParquetDataset(parquet(tmp_path, {"caption": ["x"]}))


def test_parquet_files_of_one_source_may_differ_in_columns(tmp_path):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    tables = {
        "a": {"text": ["x", None], "messages": [None, turns], "images": [["i.png"], []]},
        "b": {"extra": [1], "images": [["j.png"]], "text": ["z"]},
    }
    for name, table in tables.items():
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    dataset = open_source(tmp_path, None, ReaderOptions(columns={"vision": "images"}))
    assert [(one.text, one.messages) for one in dataset] == [
        ("x", None), (None, turns), ("z", None),
    ]
    assert dataset[2].media == {"vision": (str(tmp_path / "j.png"),)}
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="column 'images'.*vision"):
        open_source(tmp_path, None, ReaderOptions(columns={"vision": "images"}))
