"""Sections that fail, break their process, end it or exceed their time keep other parts."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import host_waits, processes, report
from benchmarks.gpu.__main__ import budgets, groups
from benchmarks.gpu.device import Device
from benchmarks.gpu.record import BrokenContextError, Record, read_parts
from benchmarks.gpu.sections import SECTIONS, Section


def broken():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def wrong():
    raise ValueError("3 is not 4")


def dies():
    os.write(1, b"last words\n")  # bypasses pytest's stdout
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs():
    subprocess.Popen(["sleep", "1000"])  # must end with its section
    time.sleep(1000)


PARTS = {
    "fine": lambda: {"figure": 1}, "wrong": wrong, "broken": broken, "dies": dies, "hangs": hangs,
}


@dataclass(frozen=True)
class Given(Section):
    """Section of some of these parts, then a good one."""

    parts: tuple[str, ...] = ()

    def run(self, device, record, share):
        for name in (*self.parts, "fine"):
            record.part(name, PARTS[name])


@pytest.fixture
def run_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    server = multiprocessing.get_context("fork")

    def run(*parts, seconds=60.0):
        section = Given("given", seconds, parts=parts)
        looks = []
        deadline = time.monotonic() + seconds
        there = processes.run_together(
            [section], server, "cpu", tmp_path, [deadline], lambda: looks.append(1)
        )
        assert there and looks
        return report.gather([section], tmp_path)["given"]

    return run


def test_a_part_that_raises_is_an_error_with_its_text(run_parts):
    found = run_parts("wrong")
    assert (found["ok"], found["errors"]) == (1, 1)
    assert found["parts"]["wrong"]["error"] == "ValueError: 3 is not 4"
    assert "in wrong" in found["parts"]["wrong"]["traceback"]
    assert found["parts"]["fine"]["figure"] == 1


@pytest.mark.parametrize("part, text", [("broken", "illegal memory"), ("dies", "SIGSEGV")])
def test_another_process_continues_after_a_broken_one(run_parts, part, text):
    found = run_parts(part, "wrong")
    assert text in found["parts"][part]["error"]
    assert found["parts"]["fine"]["state"] == "ok" and found["errors"] == 2
    if part == "dies":
        assert "last words" in found["parts"][part]["log"]


def test_a_timeout_ends_a_section_and_its_children(run_parts):
    found = run_parts("hangs", seconds=0.5)
    assert "its time was over" in found["parts"]["hangs"]["error"] and "fine" not in found["parts"]
    sleeping = subprocess.run(["pgrep", "-x", "-a", "sleep"], capture_output=True, text=True)
    assert "sleep 1000" not in sleeping.stdout


def test_parts_without_time_are_reported(tmp_path):
    path = tmp_path / "record"
    record = Record(path, 5.0)
    record.part("long", lambda: {}, needs=10.0)
    record.part("short", lambda: {}, needs=1.0)
    Record(path, 0.0).part("late", lambda: {})
    with pytest.raises(BrokenContextError):
        record.part("broken", broken)
    Record(path, 5.0, done=["again"]).part("again", wrong)
    with path.open("a") as file:
        file.write('{"part": "torn", "sta')
    states = {name: row["state"] for name, row in read_parts(path).items()}
    assert states == {"long": "not_run", "short": "ok", "late": "not_run", "broken": "error"}


def test_results_are_written_atomically(tmp_path):
    path = tmp_path / "results" / report.file_name(
        {"machine": {"parts": {"device": {"name": "NVIDIA H100 80GB HBM3"}}}}, "cuda"
    )
    assert path.name == "nvidia-h100-80gb-hbm3.json"
    row = {"state": "ok", "seconds": 1.0, "ms": {"a": 2}, "list": [1]}
    error = {"state": "error", "error": "ValueError: no"}
    first = {"one": {"ok": 1, "errors": 1, "not_run": 0, "parts": {"p": row, "q": error}}}
    report.write(path, first, time.time())
    report.write(path, {"two": first["one"] | {"ok": 7}}, time.time())
    assert [*path.parent.iterdir()] == [path]
    kept = json.loads(path.read_text())["sections"]
    assert kept["one"]["parts"] == first["one"]["parts"] and kept["two"]["ok"] == 7
    text = report.tables(first)
    assert "== one: 1 ok, 1 errors, 0 not run" in text and "! one / q: ValueError: no" in text
    assert "ms.a" in text and "list" not in text


def test_unused_time_is_given_to_later_sections():
    rest = groups([Section("a", 10), Section("b", 20, beside=True), Section("c", 70)])
    assert [[s.name for s in group] for group in rest] == [["a", "b"], ["c"]]
    assert budgets(rest, 100.0) == [10, 30.0]
    assert budgets(rest, 45.0) == [5.0, 10.0]
    assert budgets(rest[1:], 69.0) == [pytest.approx(69.0)]
    for more in (False, True):
        of_run = [s for s in SECTIONS if s is SECTIONS[0] or s.more == more]
        assert sum(max(s.seconds for s in group) for group in groups(of_run)) < 530
    assert {s.name for s in SECTIONS} == {
        path.stem for path in Path(report.__file__).parent.glob("*.py")
        if "\ndef run(device: Device, record: Record" in path.read_text()
    }


def test_waits_are_counted_by_their_line():
    with host_waits.counted(Device("cpu")) as waits:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    ((place, count),) = waits.items()
    assert count == 2 and place.startswith("tests/benchmarks/gpu/test_gpu_processes.py:")


@pytest.mark.parametrize("triton, numpy, works", [
    ("3.6.0", "2.4.6", False), ("3.5.1", "2.4.0", False), ("3.6.0", "2.3.5", True),
    ("3.7.0", "2.4.6", True),
])  # fmt: skip
def test_an_interpreter_that_fails_with_numpy_is_reported(
    tmp_path, monkeypatch, capsys, triton, numpy, works
):
    installed = {"triton": triton, "numpy": numpy}
    monkeypatch.setattr(command, "version", installed.__getitem__)
    assert (command.no_interpreter() == "") == works
    if not works:
        output = tmp_path / "results.json"
        assert command.main(["--device", "cpu", "--output", str(output)]) == 5
        text = capsys.readouterr().err
        assert f"numpy {numpy}" in text and "triton>=3.7" in text and not output.exists()
