"""Detection reads all rows of every format: forms, media, tools, unused columns."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.data import DataConfig, open_split
from raymm.data.readers import ReaderOptions
from raymm.data.readers.detect import detect
from raymm.errors import DataError
from tests.support.same_rows import write_datasets_folder, write_parquet, write_shards
from tests.support.sample_files import write_rows

TURNS = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "a cat"}]


def inline(value, kind="image"):
    user = {"role": "user", "content": [{"type": kind, kind: value}]}
    told = {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]}
    return {"messages": [user, told]}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_all_rows_decide(tmp_path):
    text = {"messages": TURNS}
    rows = [text] * 200 + [
        {"messages": TURNS, "images": ["a.png", "b.png"]}, {**text, "videos": "a.mp4"},
        {"instruction": "a", "output": "b"}, inline("a.wav", "audio"),
        {**text, "tools": "[{}]", "chat_template_kwargs": {"thinking": False}, "score": 1},
    ]
    found = detect(write(tmp_path / "d.jsonl", rows))
    assert (found.rows, found.forms) == (205, {"messages": 204, "alpaca": 1})
    assert found.modalities == {"image": "images", "video": "videos", "audio": None}
    assert found.items == {"image": 2, "video": 1, "audio": 1}
    assert (found.tools, found.template, found.unused) == (1, 1, ("score",))
    for part in ("205 rows (204 of messages, 1 of alpaca)", "2 image items in column 'images'",
                 "1 audio item in messages", "1 row with tools", "not used: score"):
        assert part in found.summary


def test_detected_configurations_can_be_opened(tmp_path):
    rows = [
        {"messages": TURNS, "image": "a.png", "source": "web"}, inline("b.png"),
        {"query": "a", "response": "b"},
    ]
    found = detect(write(tmp_path / "d.jsonl", rows))
    section = found.data_section
    assert section == {
        "train": str(tmp_path / "d.jsonl"), "modalities": {"image": {"column": "image"}},
        "ignore_columns": ["source"],
    }
    config = DataConfig(**section, processor="none", batch_size=1, microbatches=1)
    dataset = open_split(config, "train")
    assert dataset.counts["image"].tolist() == [1, 1, 0]
    assert detect(tmp_path / "d.jsonl").items == {"image": 2}


WRITERS = {
    "json": lambda folder: write_rows(folder, 20) and folder / "train.jsonl",
    "parquet": lambda folder: write_parquet(folder, 20),
    "tar": lambda folder: write_shards(folder, 20),
    "datasets": lambda folder: write_datasets_folder(folder, 20),
}


@pytest.mark.parametrize("format", WRITERS)
def test_every_format_is_detected_the_same(tmp_path, format):
    found = detect(WRITERS[format](tmp_path))
    assert (found.format, found.rows, found.forms) == (format, 20, {"messages": 16, "text": 4})
    columns = {"image": "*.png", "audio": "wav"} if format == "tar" else {
        "image": "images", "audio": "audio"
    }
    assert found.modalities == columns
    assert found.items == {"image": 16, "audio": 8}
    assert not found.unused and not found.frames


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_lists_of_frames_and_preferences(tmp_path, name):
    pair = {"chosen": [*TURNS], "rejected": [TURNS[0], {**TURNS[1], "content": "a dog"}]}
    rows = [{**pair, "videos": [["a.png", "b.png"], ["c.png"]]}] * 2
    if name == "d.jsonl":
        write(tmp_path / name, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    found = detect(tmp_path / name)
    assert (found.forms, found.preferences) == ({"preference": 2}, 2)
    assert found.frames == {"video"} and found.items == {"video": 4}
    assert found.data_section["modalities"] == {"video": {"column": "videos", "frames": True}}


def test_media_inside_of_messages_of_parquet(tmp_path):
    pq.write_table(pa.Table.from_pylist([inline("a.png")] * 3), tmp_path / "d.parquet")
    found = detect(tmp_path / "d.parquet")
    assert (found.modalities, found.items) == ({"image": None}, {"image": 3})
    rows = [{"messages": json.dumps(inline("a.png")["messages"]), "note": "x"}] * 2
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    found = detect(tmp_path / "d.parquet")
    assert (found.modalities, found.items, found.unused) == ({"image": None}, {"image": 2},
                                                             ("note",))


def test_keys_of_parts_that_nothing_uses_are_listed(tmp_path):
    part = {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}
    rows = [{"messages": [{"role": "user", "content": [part]}, TURNS[1]]}]
    assert detect(write(tmp_path / "d.jsonl", rows)).unused == ("detail",)


def test_two_columns_of_a_kind_are_refused(tmp_path):
    rows = [{"text": "a", "image": "a.png"}, {"text": "a", "images": ["a.png"]}]
    path = write(tmp_path / "d.jsonl", rows)
    with pytest.raises(DataError, match="'image'.*in the columns 'image' and 'images'|'images'"):
        detect(path)
    options = ReaderOptions(ignore_columns=frozenset({"image"}))
    assert detect(path, None, options).modalities == {"image": "images"}


def test_a_column_that_only_some_rows_use_is_refused(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"messages": TURNS, "text": "a"}, {"text": "b"}])
    with pytest.raises(DataError, match=r"'text' is used by some rows .*:2\).*others .*:1\)"):
        detect(path)


@pytest.mark.parametrize(("row", "message"), [
    ({"caption": "a"}, "d.jsonl:2: a sample needs 'messages'"),
    ({"text": "a", "image": 5}, "d.jsonl:2: column 'image' must be a path"),
    ({"text": "a", "image": "../a.png"}, "d.jsonl:2: column 'image' names .*media_folders"),
])
def test_rows_that_cannot_be_used_are_named(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        detect(write(tmp_path / "d.jsonl", [{"text": "a"}, row]))


@pytest.mark.parametrize(("value", "kind"), [
    ("a/b.PNG", "image"), (["a.wav"], "audio"), ({"path": "a.mp4"}, "video"), ("see a.png", None),
    ("v1.5", None), (3, None),
])
def test_an_unused_column_that_names_media_is_pointed_out(tmp_path, value, kind):
    path = write(tmp_path / "d.jsonl", [{"text": "a", "file": value}])
    found = detect(path)
    assert found.unused == ("file",) and not found.modalities
    assert found.names_media == ({"file": kind} if kind else {})
    assert (f"names {kind} files" in found.summary) == (kind is not None)
    config = DataConfig(train=str(path), tokenizer="none", batch_size=1, microbatches=1)
    hint = rf"{{{kind}: {{column: file}}}}" if kind else "not used"
    with pytest.raises(DataError, match=hint):
        open_split(config, "train")


@pytest.mark.parametrize("kind", ["json", "parquet", "datasets"])
def test_columns_of_media_without_items_are_ignored(tmp_path, kind):
    row = {"messages": TURNS, "images": [], "audio": None, "tools": None}
    if kind == "json":
        path = write(tmp_path / "d.jsonl", [row] * 2)
    elif kind == "parquet":
        path = tmp_path / "d.parquet"
        schema = pa.Table.from_pylist([{**row, "images": ["a"], "audio": "a"}]).schema
        pq.write_table(pa.Table.from_pylist([row] * 2, schema=schema), path)
    else:
        import datasets

        path = tmp_path / "saved"
        datasets.Dataset.from_list([row] * 2).save_to_disk(path)
    found = detect(path)
    assert not found.modalities
    config = DataConfig(**found.data_section, tokenizer="none", batch_size=1, microbatches=1)
    assert open_split(config, "train")[1].messages == TURNS


POOL = [
    {"messages": TURNS}, {"messages": TURNS, "images": ["a.png", "b.png"], "source": "web"},
    {"messages": TURNS, "text": "a", "tools": "[{}]"}, {"text": "a", "audio": "a.wav"},
    {"instruction": "a", "input": "b", "output": "c", "category": 1}, {"text": "b", "prompt": "x"},
    {"query": "a", "response": "b", "images": []}, {"prompt": "a", "completion": "b", "id": "7"},
    {"chosen": TURNS, "rejected": [TURNS[0], {**TURNS[1], "content": "dog"}], "messages": None},
    {"messages": json.dumps(inline("a.png")["messages"]), "system": ""},
]


@given(st.lists(st.sampled_from(POOL), min_size=1, max_size=6), st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_mix_of_rows_opens_as_detected(tmp_path_factory, rows, columnar):
    folder = tmp_path_factory.mktemp("mix")
    if columnar:
        rows = [
            {**row, "messages": json.dumps(row["messages"]) if isinstance(row["messages"], list)
             else row["messages"]} if row.get("messages") else row
            for row in rows
        ]
        columns = sorted({key for row in rows for key in row})
        path = folder / "d.parquet"
        table = pa.Table.from_pylist([{key: row.get(key) for key in columns} for row in rows])
        pq.write_table(table, path)
    else:
        path = write(folder / "d.jsonl", rows)
    try:
        found = detect(path)
    except DataError as error:
        assert "is used by some rows" in str(error)
        return
    config = DataConfig(**found.data_section, processor="none", batch_size=1, microbatches=1)
    dataset = open_split(config, "train")
    assert len(dataset) == found.rows == len(rows) == sum(found.forms.values())
    for kind in ("image", "audio"):
        read = sum(len(dataset[n].media.get(kind, ())) for n in range(len(rows)))
        assert read == found.items.get(kind, 0)
        assert read == (int(dataset.counts[kind].sum()) if kind in dataset.counts else 0)
