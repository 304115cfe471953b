"""Files of rows: arrays, folders, globs, compressed files, broken lines, unused columns."""

import errno
import gzip
import json
import os
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.actors.faults.failure_kind import failure_kind
from raymm.data import DataConfig, JsonDataset, open_source, open_split
from raymm.data.readers import ReaderOptions, json_rows, row_index
from raymm.errors import ConfigError, DataError, FailureKind, SampleError

TURNS = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "é 日本"}]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("RAYMM_CACHE", str(folder))
    return folder


def rows_of(count, first=0):
    return [{"id": str(n), "messages": TURNS} for n in range(first, first + count)]


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def ids(reader):
    return [reader[index].id for index in range(len(reader))]


BODIES = {
    "blank lines": lambda rows: "\n\n" + lines(rows).replace("\n", "\n\r\n \n"),
    "byte order mark": lambda rows: "\ufeff" + lines(rows),
    "two marks": lambda rows: "\ufeff\ufeff" + lines(rows),
    "a mark in each line": lambda rows: "".join(f"\ufeff{json.dumps(row)}\n" for row in rows),
    "no last line end": lambda rows: lines(rows).rstrip("\n"),
    "array on one line": lambda rows: json.dumps(rows),
    "array, indented": lambda rows: "\ufeff\n" + json.dumps(rows, indent=2, ensure_ascii=False),
    "array, a row per line": lambda rows: "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n",
}


@pytest.mark.parametrize("name", ["d.json", "d.jsonl", "d.txt"])
@pytest.mark.parametrize("body", BODIES)
def test_lines_and_arrays_of_any_layout(tmp_path, body, name):
    (tmp_path / name).write_text(BODIES[body](rows_of(3)), encoding="utf-8")
    reader = pickle.loads(pickle.dumps(open_source(tmp_path / name)))
    assert ids(reader) == ["0", "1", "2"]
    assert reader[2].messages == TURNS


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(st.lists(JSON, max_size=8), st.sampled_from([None, 1]), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_arrays_are_read_in_blocks_of_any_size(tmp_path_factory, values, indent, block):
    path = tmp_path_factory.mktemp("array") / "d.json"
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=False), encoding="utf-8",
                    errors="surrogatepass")
    before, json_rows.SCAN_BLOCK = json_rows.SCAN_BLOCK, block
    try:
        found = list(json_rows._array_rows(path, path))
    except DataError as error:
        assert "is not UTF-8" in str(error)  # half a character in the text
        return
    finally:
        json_rows.SCAN_BLOCK = before
    content = path.read_bytes()
    assert [row for _, _, _, row in found] == values
    assert [json.loads(content[start:stop]) for start, stop, _, _ in found] == values


@pytest.mark.parametrize(("body", "message"), [
    ('{"id": 1\n', r":1: the line is not JSON: .*cut off"),
    ('{"text": "a"}\n{\'text\': 1}\n', r":2: .*double quotes.*json.dumps"),
    ('{"text": "a"}\nhello\n', r":2: .*Each line must be one JSON object"),
    ('{\n "text": "a"\n}\n', r":1: .*object over several lines"),
    ('[{"text": "a"}]\n[{"text": "b"}]', ":2: '\\[' follows the end of the array"),
    ('[{"text": "a"},\n{"text": "b"}\n{"text": "c"}]', r":3: expected ',' or '\]' after element 1"),
    ('[{"text": "a"},\n{"text": }]', r":2: element 1 of the array is not a JSON value"),
    ('[{"text": "a"},\n{"text": "b"}\n', r":3: expected .* after element 1, but the file ends"),
])
def test_broken_files_name_the_line_and_a_remedy(tmp_path, body, message):
    (tmp_path / "d.jsonl").write_text(body)
    with pytest.raises(DataError, match=r"d\.jsonl" + message):
        open_source(tmp_path / "d.jsonl")


def test_folders_and_globs_are_read_by_name(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a.jsonl").write_text(lines(rows_of(2)))
    (tmp_path / "b" / "c.json").write_text(json.dumps(rows_of(2, 2)))
    (tmp_path / "dataset_info.json").write_text('{"features": {}}')
    (tmp_path / ".hidden" / "x.jsonl").write_text("no rows")
    (tmp_path / "README.md").write_text("about")
    reader = open_source(tmp_path)
    assert ids(reader) == ["0", "1", "2", "3"]
    assert [reader.place(n).removeprefix(f"{tmp_path}/") for n in (1, 3)] == [
        "a.jsonl:2", "b/c.json[1]",
    ]
    assert ids(open_source(tmp_path / "**" / "*.json*", "json")) == ["0", "1", "2", "3"]
    assert ids(open_source(tmp_path / "b" / "*")) == ["2", "3"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="contains no .*jsonl"):
        open_source(tmp_path / "empty")


def test_media_are_relative_to_the_folder_of_their_file(tmp_path):
    (tmp_path / "b").mkdir()
    for folder in (tmp_path, tmp_path / "b"):
        (folder / "d.jsonl").write_text(json.dumps({"text": "a", "image": "i.png"}) + "\n")
    (tmp_path / "b" / "e.jsonl").write_text(json.dumps({"text": "a", "image": "../i.png"}) + "\n")
    reader = open_source(tmp_path, None, ReaderOptions(columns={"image": "image"}))
    assert [sample.media["image"] for sample in reader] == [
        (str(tmp_path / "b/i.png"),), (str(tmp_path / "i.png"),), (str(tmp_path / "i.png"),),
    ]
    (tmp_path / "b" / "e.jsonl").write_text(json.dumps({"text": "a", "image": "../../i"}) + "\n")
    with pytest.raises(DataError, match="e.jsonl:1: .*outside"):
        open_source(tmp_path, None, ReaderOptions(columns={"image": "image"}))


@pytest.mark.parametrize(("name", "content", "described"), [
    ("info.json", '{\n "rows": 2\n}', True), ("dataset_infos.json", "[]", True),
    ("rows.json", json.dumps(rows_of(1)), False), ("rows.jsonl", lines(rows_of(1)), False),
])
def test_a_description_next_to_shards_is_not_data(tmp_path, name, content, described):
    table = pa.table({"text": ["a", "b"]})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / name).write_text(content)
    if described:
        assert [sample.text for sample in open_source(tmp_path)] == ["a", "b"]
    else:
        with pytest.raises(DataError, match=r"files of \['json', 'parquet'\]; set 'format'"):
            open_source(tmp_path)


def zstd_compress(data):
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


COMPRESS = {".gz": gzip.compress, ".zst": zstd_compress}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["d.jsonl", "d.json"])
def test_compressed_files_are_read_at_random(tmp_path, cache, suffix, name):
    rows = rows_of(40)
    body = lines(rows) if name == "d.jsonl" else json.dumps(rows)
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(COMPRESS[suffix](body.encode()))
    reader = open_source(path)
    packed = pickle.dumps(reader)
    assert reader[31].id == "31" and reader[3].id == "3" and reader.name == "d"
    assert str(path) in reader.place(0)
    (copy,) = (cache / "decompressed").iterdir()
    copy.unlink()  # as on another node
    assert pickle.loads(packed)[31].id == "31"
    assert copy.is_file()
    before = copy.stat().st_mtime_ns
    assert ids(open_source(tmp_path)) == [str(n) for n in range(40)]
    assert copy.stat().st_mtime_ns == before
    path.write_bytes(COMPRESS[suffix](lines(rows_of(2)).encode()))
    copy.unlink()
    with pytest.raises(DataError, match="changed while the run"):
        pickle.loads(packed)[31]
    assert len(open_source(path)) == 2


def test_a_file_that_cannot_be_opened_now_has_not_changed(tmp_path, monkeypatch):
    path = tmp_path / "d.jsonl"
    path.write_text(lines(rows_of(2)))
    source = open_source(path)

    def fail(index):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(source, "_row", fail)
    with pytest.raises(DataError, match="cannot be read now: .*Too many open files") as caught:
        source[0]
    assert failure_kind(caught.value) is FailureKind.RESOURCE


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_truncated_compressed_file_leaves_no_copy(tmp_path, cache, suffix):
    content = COMPRESS[suffix](os.urandom(2000).hex().encode())
    (tmp_path / f"d.jsonl{suffix}").write_bytes(content[:-10])
    with pytest.raises(DataError, match=r"d.jsonl.*not a complete compressed file .*cut off"):
        open_source(tmp_path / f"d.jsonl{suffix}")
    assert not list((cache / "decompressed").iterdir())
    one = COMPRESS[suffix](lines(rows_of(2)).encode())
    (tmp_path / f"e.jsonl{suffix}").write_bytes(one + one)  # as written by `cat a.gz b.gz`
    assert len(open_source(tmp_path / f"e.jsonl{suffix}")) == 4


def test_a_missing_decoder_of_zstd_is_named(tmp_path, monkeypatch):
    (tmp_path / "d.jsonl.zst").write_bytes(zstd_compress(lines(rows_of(1)).encode()))
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"needs the package zstandard.*raymm\[zstd\]"):
        open_source(tmp_path / "d.jsonl.zst")


def test_the_index_of_a_large_file_is_stored(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(row_index, "LARGE_SOURCE", 10)
    rows = [*rows_of(3), {"id": "x"}, {"text": "a", "images": ["a.png", "b.png"]}]
    (tmp_path / "d.jsonl").write_text(lines(rows))
    options = ReaderOptions(columns={"image": "images"}, skip=True)
    first = open_source(tmp_path / "d.jsonl", None, options)
    monkeypatch.setattr(json_rows, "_line_rows", None)  # nothing is read again
    second = open_source(tmp_path / "d.jsonl", None, options)
    assert second.survey == first.survey
    assert second.counts["image"].tolist() == first.counts["image"].tolist() == [0, 0, 0, 0, 2]
    assert [second[n].id for n in (0, 1, 2)] == ["0", "1", "2"]
    with pytest.raises(SampleError, match="a sample needs"):
        second[3]
    for file in (cache / "indexes").iterdir():
        file.write_bytes(file.read_bytes()[:-40])
    monkeypatch.undo()
    monkeypatch.setenv("RAYMM_CACHE", str(cache))
    monkeypatch.setattr(row_index, "LARGE_SOURCE", 10)
    assert open_source(tmp_path / "d.jsonl", None, options).survey == first.survey
    (tmp_path / "d.jsonl").write_text(lines(rows_of(6)))
    assert len(open_source(tmp_path / "d.jsonl", None, options.__class__())) == 6


def test_progress_is_reported_up_to_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(row_index, "_REPORT_SECONDS", 0.0)
    (tmp_path / "d.jsonl").write_text(lines(rows_of(4)))
    seen = []
    open_source(tmp_path / "d.jsonl", None, None, lambda rows, part: seen.append((rows, part)))
    assert [rows for rows, _ in seen] == [1, 2, 3, 4]
    assert seen[-1][1] == 1.0 and sorted(seen) == seen


def config(path, **fields):
    return DataConfig(**{
        "train": str(path), "tokenizer": "none", "batch_size": 1, "microbatches": 1, **fields
    })


WRITERS = {
    "d.jsonl": lambda path, rows: path.write_text(lines(rows)),
    "d.parquet": lambda path, rows: pq.write_table(pa.Table.from_pylist(rows), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_column_that_nothing_uses_is_refused_by_name(tmp_path, name):
    rows = [{**row, "source": "web", "images": ["a.png"]} for row in rows_of(2)]
    WRITERS[name](tmp_path / name, rows)
    with pytest.raises(DataError) as error:
        open_split(config(tmp_path / name), "train")
    for part in ("'source'", "'images'", "ignore_columns", "{image: {column: images}}", "messages"):
        assert part in str(error.value)
    ignored = config(tmp_path / name, ignore_columns=["source", "images"])
    assert len(open_split(ignored, "train")) == 2
    source = {"path": str(tmp_path / name), "ignore_columns": ["source"]}
    both = config("", train=[source], ignore_columns=["images"])
    assert len(open_split(both, "train")) == 2


@pytest.mark.parametrize("name", WRITERS)
def test_the_row_form_of_a_source_wins(tmp_path, name):
    rows = [{"messages": TURNS, "text": "a"}] * 2
    WRITERS[name](tmp_path / name, rows)
    ignored = {"ignore_columns": ["messages"]}
    dataset = open_split(config(tmp_path / name, row_form="text", **ignored), "train")
    assert dataset[0].text == "a"
    source = {"path": str(tmp_path / name), "row_form": "text", **ignored}
    assert open_split(config("", train=[source], row_form="messages"), "train")[1].text == "a"


def parts(value):
    user = {"role": "user", "content": [{"type": "image", **value}, {"type": "text", "text": "a"}]}
    return [user, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]


@pytest.mark.parametrize("as_json", [False, True])
def test_media_inside_of_messages_of_parquet_are_counted(tmp_path, as_json):
    value = {"image": "a.png"}
    rows = [{"id": "0", "messages": parts(value)}, {"id": "1", "messages": TURNS}]
    for row in rows if as_json else rows[:1]:
        row["messages"] = json.dumps(row["messages"]) if as_json else row["messages"]
    pq.write_table(pa.Table.from_pylist(rows[: 2 if as_json else 1]), tmp_path / "d.parquet")
    options = ReaderOptions(parts={"image": "image"})
    reader = open_source(tmp_path / "d.parquet", None, options)
    assert reader.counts["image"].tolist() == ([1, 0] if as_json else [1])
    assert reader[0].media["image"] == (str(tmp_path / "a.png"),)
    assert reader[0].messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "a"}]


def test_bytes_inside_of_messages_of_parquet(tmp_path):
    pq.write_table(
        pa.Table.from_pylist([{"messages": parts({"image": {"bytes": b"x", "path": None}})}]),
        tmp_path / "d.parquet",
    )
    reader = open_source(tmp_path / "d.parquet", None, ReaderOptions(parts={"image": "image"}))
    (item,) = reader[0].media["image"]
    assert item.data == b"x" and reader.counts["image"].tolist() == [1]


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_tool_calls_of_columnar_files_lose_their_nulls(tmp_path, kind):
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "cat"}}}
    messages = [
        {"role": "user", "content": "look", "tool_calls": None, "loss": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "loss": False},
        {"role": "tool", "content": "a cat", "tool_calls": None, "loss": None},
        {"role": "assistant", "content": "a cat", "tool_calls": None, "loss": None},
    ]
    rows = [{"messages": messages, "tools": [{"name": "look", "default": None}]}]
    if kind == "parquet":
        path = tmp_path / "d.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        import datasets

        path = tmp_path / "saved"
        datasets.Dataset.from_list(rows).save_to_disk(path)
    sample = open_source(path)[0]
    assert sample.messages == [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call], "loss": False},
        {"role": "tool", "content": "a cat"}, {"role": "assistant", "content": "a cat"},
    ]
    assert sample.tools == [{"name": "look"}]


def test_rows_of_parquet_have_the_form_of_their_values(tmp_path):
    rows = [{"text": "a", "messages": None}, {"text": None, "messages": TURNS}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    dataset = open_split(config(tmp_path / "d.parquet"), "train")
    assert [dataset[0].text, dataset[1].messages] == ["a", TURNS]
    assert dataset.survey.forms == {"text": 1, "messages": 1}
    rows[0]["messages"] = TURNS
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"columns \['text'\] are not used"):
        open_split(config(tmp_path / "d.parquet"), "train")


def test_rows_that_cannot_be_used_are_skipped_in_every_form(tmp_path):
    rows = [
        {"instruction": "a", "output": "b"}, {"instruction": "a", "output": 5},
        {"messages": parts({"image": "../x.png"})}, {"messages": parts({"image": "a.png"})},
    ]
    (tmp_path / "d.jsonl").write_text(lines(rows))
    options = ReaderOptions(parts={"image": "image"}, skip=True)
    reader = JsonDataset(tmp_path / "d.jsonl", None, options)
    assert reader.counts["image"].tolist() == [0, 0, 0, 1]
    for index, message in ((1, "'output' must be a string"), (2, "outside of the source's")):
        with pytest.raises(SampleError, match=message):
            reader[index]
    (tmp_path / "a.png").symlink_to("/etc/hostname")
    with pytest.raises(SampleError, match="outside of the source's"):
        reader[3]


LINE = st.one_of(
    st.binary(max_size=30),
    st.sampled_from([
        b"{}", b"[", b"null", b'{"text": "a"}', b'{"messages": []}', b"\xef\xbb\xbf{}", b"[1,",
        b'{"text": "\\ud800"}', b'{"text": "a", "images": "x.png"}', b'{"instruction": 1}',
        b'{"text": "a", "images": ["../x"]}', b'{"messages": "[{}]"}', b'{"text": "a"', b"]",
    ]),
)


@given(st.lists(LINE, max_size=6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_bytes_are_a_reader_or_a_data_error(tmp_path_factory, content, skip):
    path = tmp_path_factory.mktemp("any") / "d.jsonl"
    path.write_bytes(b"\n".join(content))
    options = ReaderOptions(columns={"image": "images"}, skip=skip)
    try:
        reader = JsonDataset(path, None, options)
    except DataError:
        return
    for index in range(len(reader)):
        try:
            assert (reader[index].text is None) != (reader[index].messages is None)
        except SampleError:
            assert skip
