"""Metrics file over restarts."""

import resource

import pytest

from raymm.errors import ConfigError, RunFileError
from raymm.monitor.metrics import MetricsLog, SampleLog, read_metrics


def rows(*steps):
    return [{"step": step, "loss": step / 3} for step in steps]


def test_rows_are_kept_to_the_last_bit(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for row in rows(1, 2, 3):
        log.add(row)
    assert log.rows == rows(1, 2, 3) == read_metrics(tmp_path / "metrics.jsonl")


def test_rows_after_the_resume_step_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for row in rows(1, 2, 3, 4):
        MetricsLog(path, row["step"]).add(row)
    log = MetricsLog(path, resume_step=2)
    log.add({"step": 3, "loss": 9.0})
    expected = [*rows(1, 2), {"step": 3, "loss": 9.0}]
    assert log.rows == expected == read_metrics(path)
    assert not path.with_name("metrics.jsonl.tmp").exists()


def test_a_new_run_drops_the_rows_of_an_older_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).add({"step": 0, "heldout_loss": 1.0})
    assert MetricsLog(path, resume_step=0).rows == []
    assert path.read_text() == ""


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 0.5}]
    MetricsLog(path, resume_step=2).add({"step": 3, "loss": 0.25})
    assert [row["step"] for row in read_metrics(path)] == [1, 3]


def test_rows_stay_in_memory_while_the_disk_is_full(small_disk):
    path, said = small_disk.path / "metrics.jsonl", []
    log = MetricsLog(path, say=said.append)
    samples = SampleLog(small_disk.path / "samples.jsonl")
    log.add(rows(1)[0])
    small_disk.fill()
    for row in rows(2, 3):
        log.add({**row, "long": "x" * 5000})
        samples.add(row["step"], [["a"]], [])
    assert read_metrics(path) == rows(1) and len(log.rows) == 3
    with pytest.raises(RunFileError, match="metrics.jsonl: No space left"):
        log.finish()
    log.rewind(2)  # step 3 is repeated
    small_disk.empty()
    log.add(rows(3)[0])
    log.finish()
    samples.finish()
    assert log.rows == read_metrics(path) and [row["step"] for row in log.rows] == [1, 2, 3]
    assert [row["step"] for row in read_metrics(small_disk.path / "samples.jsonl")] == [2, 3]
    assert len(said) == 2
    assert said[0].endswith("The run continues; rows are in memory until it can be written")
    assert said[1].endswith("is writable again and has all rows")


def test_rows_stay_in_memory_while_the_disk_is_read_only(small_disk):
    path = small_disk.path / "metrics.jsonl"
    log = MetricsLog(path)
    for row in rows(1, 2):
        log.add(row)
    small_disk.set_writable(False)
    log.rewind(1)
    log.add(rows(2)[0])
    log.add(rows(3)[0])
    assert read_metrics(path) == rows(1, 2)
    small_disk.set_writable(True)
    log.finish()
    assert read_metrics(path) == rows(1, 2, 3)


def test_a_partially_written_row_is_removed(tmp_path):
    """Limit the file size, as if the disk had room for a part of a row."""
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.add(rows(1)[0])
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        log.add(rows(2)[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    log.add(rows(3)[0])
    assert read_metrics(path) == rows(1, 2, 3)


@pytest.mark.parametrize("line", [
    b"[1]", b'"x"', b"{}", b'{"step": "1"}', b'{"step": null}', b'{"step": true}', b"\xe9",
    b"\0" * 50, b"[" * 100_000, b'{"step": ' + b"1" * 5000 + b"}",
])  # fmt: skip
def test_an_invalid_row_is_reported_and_nothing_is_written(tmp_path, line):
    """Stop, because a resumed log would lose the line; only the last line may be cut off."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(text := b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(ConfigError, match="line 2 is .*, which is not a row that raymm wrote"):
        MetricsLog(path, resume_step=2)
    assert path.read_bytes() == text
    path.write_bytes(b'{"step": 1}\n' + line)
    assert MetricsLog(path, resume_step=2).rows == [{"step": 1}]
