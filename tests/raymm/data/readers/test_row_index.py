"""Indexes of rows: counts, unusable rows, the summary, and their storage on disk."""

import json
from dataclasses import replace

import numpy as np
import pytest

from raymm.data import open_source
from raymm.data.readers import ReaderOptions
from raymm.data.readers import row_index as indexes
from raymm.data.readers.row_index import ProgressReport, RowIndex
from raymm.data.samples.folders import MediaFolders
from raymm.errors import DataError, SampleError

OPTIONS = ReaderOptions(columns={"vision": "images"}, parts={"audio": "audio"})
ASKED = [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]},
         {"role": "assistant", "content": "yes"}]


@pytest.fixture
def folders(tmp_path):
    return MediaFolders(tmp_path)


def test_items_of_columns_and_messages_are_counted(folders):
    index = RowIndex(OPTIONS)
    index.add({"text": "a", "images": ["i.png", "j.png"]}, "x:1", folders)
    index.add({"messages": ASKED, "key": "p.png"}, "x:2", folders)
    index.add({"text": "b"}, "x:3", folders, {"vision": 3})
    index.finish()
    assert {name: counts.tolist() for name, counts in index.counts.items()} == {
        "vision": [2, 0, 3], "audio": [0, 1, 0],
    }
    assert len(index) == 3 and index.survey.forms == {"text": 2, "messages": 1}
    assert index.survey.unused == {"key": "x:2"} and index.survey.names_media == {"key": "image"}
    assert index.survey.inline == {"audio": 1}


def test_an_unusable_row_is_an_error_or_kept(folders):
    index = RowIndex(OPTIONS)
    with pytest.raises(DataError, match="x:1: no JSON"):
        index.add(SampleError("no JSON"), "x:1", folders)
    index = RowIndex(replace(OPTIONS, skip=True))
    index.add(SampleError("no JSON"), "x:1", folders)
    index.add({"text": "a", "images": "i.png"}, "x:2", folders)
    assert index.bad[0].reason == "no JSON" and list(index.bad) == [0]
    assert index.finish().counts["vision"].tolist() == [0, 1]


def test_items_in_a_column_and_in_messages_are_refused(folders):
    options = replace(OPTIONS, columns={"audio": "sounds"})
    with pytest.raises(DataError, match="audio items in column 'sounds' and in parts"):
        RowIndex(options).add({"messages": ASKED}, "x:1", folders, {"audio": 1})


@pytest.fixture
def large(tmp_path, monkeypatch):
    """Store the index of every source; return a file of rows whose last one is unusable."""
    monkeypatch.setenv("RAYMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(indexes, "LARGE_SOURCE", 1)
    rows = [{"text": "a", "images": ["i.png"]}, {"messages": ASKED}, {"images": []}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "rows.jsonl"


@pytest.mark.parametrize("damage", [None, b"", b"PK\3\4 no index"])
def test_a_stored_index_equals_a_new_one(large, damage):
    options = replace(OPTIONS, skip=True)
    first = open_source(large, None, options)
    (stored,) = (large.parent / "cache" / "indexes").iterdir()
    content = stored.read_bytes()
    if damage is not None:
        stored.write_bytes(damage)
    second = open_source(large, None, options)
    assert vars(second.survey) == vars(first.survey)
    assert all(np.array_equal(second.counts[name], first.counts[name]) for name in first.counts)
    assert [second[n] for n in (0, 1)] == [first[n] for n in (0, 1)]
    for reader in (first, second):
        with pytest.raises(SampleError, match="a sample needs"):
            reader[2]
    # A damaged file is replaced, an intact one is not written again.
    with np.load(stored) as arrays:
        assert "summary" in arrays.files
    assert (stored.read_bytes() == content) or damage is not None


def test_another_file_or_other_options_have_another_index(large):
    folder = large.parent / "cache" / "indexes"
    options = replace(OPTIONS, skip=True)
    open_source(large, None, options)
    open_source(large, None, replace(options, columns={}))
    large.write_text(json.dumps({"text": "longer than before", "images": []}) + "\n")
    assert len(open_source(large, None, options)) == 1
    assert len(list(folder.iterdir())) == 3


def test_progress_is_reported_once_per_interval(monkeypatch):
    calls = []
    report = ProgressReport("x", lambda rows, fraction: calls.append((rows, fraction)))
    report(1, 0.1)
    assert calls == []
    monkeypatch.setattr(indexes, "_REPORT_SECONDS", 0.0)
    report = ProgressReport("x", lambda rows, fraction: calls.append((rows, fraction)))
    report(2, 1.5)
    assert calls == [(2, 1.0)]
