"""Loops start in Python and continue in machine code, which no training step waits for."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from raymm.scheduler.schedule.compiled import machine_code


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "PATIENCE_S", 1e-9)
    doubled = machine_code.entry(lambda number: number * 2)
    assert not doubled.in_machine_code.signatures
    assert doubled(4) == 8 and not doubled.in_machine_code.signatures
    assert doubled(5) == 10 and len(doubled.in_machine_code.signatures) == 1


def test_no_step_waits_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in a thread while Python computes the same."""
    monkeypatch.setattr(machine_code, "PATIENCE_S", 1e-9)
    callers = []

    def doubled(number):
        return number * 2

    entry = machine_code.entry(doubled)
    compiler, may_compile = entry.in_machine_code.compile, threading.Event()

    def compile_later(types):
        callers.append(threading.current_thread())
        may_compile.wait()
        return compiler(types)

    monkeypatch.setattr(entry.in_machine_code, "compile", compile_later)
    with machine_code.compiling_behind():
        assert [entry(number) for number in range(5)] == [0, 2, 4, 6, 8]
        assert not entry.in_machine_code.signatures
        may_compile.set()
        (thread,) = entry.compiling.values()
        thread.join()
        assert entry(5) == 10 and len(entry.in_machine_code.signatures) == 1
        assert entry(0.5) == 1.0  # another type: Python again
    assert callers[0] is thread and threading.main_thread() not in callers


COMPILES = """
import sys
from raymm.scheduler.schedule.compiled import machine_code
machine_code.PATIENCE_S = -1.0

@machine_code.entry
def slow(x):
{lines}
    return x

with machine_code.compiling_behind():
    slow(3)
(thread,) = slow.compiling.values()
thread.join(0.5)
assert thread.is_alive()
sys.exit(3)
"""


def test_a_process_ends_while_a_thread_compiles(tmp_path) -> None:
    """Check that it keeps its exit code and does not wait."""
    lines = "\n".join(f"    x += {n} * (x % {n + 2})" for n in range(400))
    (script := tmp_path / "compiles.py").write_text(COMPILES.format(lines=lines))
    child = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert child.returncode == 3, child.stderr
