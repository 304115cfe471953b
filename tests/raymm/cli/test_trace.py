"""Timelines of runs: their table, and files that are refused."""

import argparse
import json

import pytest

from raymm.cli.trace import read_events, run_trace, trace_table
from raymm.errors import ConfigError


def span(name, tid, start, length, pid=0):
    return {"ph": "X", "name": name, "cat": name, "pid": pid, "tid": tid, "ts": start,
            "dur": length}


EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "measured"}},
    *({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
      for rank in (1, 0)),
    span("forward", 0, 1000, 2000), span("recv", 1, 1000, 2000), span("backward", 1, 3000, 1000),
    span("optimizer", 0, 3000, 2000),
]


def write(folder, events=EVENTS):
    (file := folder / "trace.json").write_text(json.dumps({"traceEvents": events}))
    return file


def test_rows_have_busy_waiting_and_bubble(tmp_path):
    table = trace_table(file := write(tmp_path), read_events(file))
    cells = [list(column.cells) for column in table.columns]
    assert list(zip(*cells, strict=True)) == [
        ("measured", "rank 0", "2.0", "0.0", "4.0", "50%"),
        ("measured", "rank 1", "1.0", "2.0", "4.0", "75%"),
    ]


def test_a_timeline_without_spans_has_no_bubble(tmp_path):
    table = trace_table(file := write(tmp_path, EVENTS[:2]), read_events(file))
    assert list(table.columns[-1].cells) == ["-"]
    assert trace_table(file, []).row_count == 0


@pytest.mark.parametrize(("text", "reason"), [
    ("", "trace.json"), ("{", "trace.json"),
    ("[]", "is not a timeline that raymm wrote: the whole"),
    ("{}", "is not a timeline that raymm wrote: traceEvents"),
    ('{"traceEvents": [{"ph": "X", "name": "a", "pid": 0, "dur": -1}]}', "traceEvents.0.dur"),
    ('{"traceEvents": [{"ph": "X", "name": "a", "pid": "0"}]}', "traceEvents.0.pid"),
    ('{"traceEvents": [{"ph": "X", "name": "a", "pid": 0, "ts": NaN}]}', "traceEvents.0.ts"),
])
def test_other_files_are_refused_by_name(tmp_path, text, reason):
    (file := tmp_path / "trace.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_events(file)
    assert str(file) in str(error.value) and reason in str(error.value)


def test_a_folder_without_a_timeline_is_named(tmp_path):
    for folder, reason in ((tmp_path / "none", "no such folder"), (tmp_path, "no trace.json")):
        with pytest.raises(ConfigError, match=f"run_folder is '{folder}'; .*{reason}"):
            run_trace(argparse.Namespace(run_folder=str(folder)))
