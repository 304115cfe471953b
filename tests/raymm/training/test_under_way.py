"""Long work is shown: by lines, or by a spinner on a terminal."""

from __future__ import annotations

import threading
from io import StringIO

from rich.console import Console

from raymm.training.under_way import UnderWay


class Output(StringIO):
    """Text output that reports each line."""

    def __init__(self) -> None:
        super().__init__()
        self.wrote = threading.Event()

    def write(self, text: str) -> int:
        done = super().write(text)
        self.wrote.set()
        return done


def test_a_file_gets_lines_with_the_current_text():
    output = Output()
    with UnderWay(Console(file=output), "loading", silence=0.01) as work:
        assert output.wrote.wait(60)
        work.update("counting [tokens]: 5 of 9")
        while "counting" not in output.getvalue():
            output.wrote.clear()
            assert output.wrote.wait(60)
    lines = output.getvalue().splitlines()
    assert lines[0] == "loading (0 s)" and lines[-1].startswith("counting [tokens]: 5 of 9 (")
    assert not [t for t in threading.enumerate() if t.name == "under-way"]


def test_other_lines_count_as_progress():
    output = Output()
    with UnderWay(Console(file=output), "loading", silence=3600) as work:
        work.line("a plan")
    assert output.getvalue() == "a plan\n"


def test_a_terminal_gets_a_spinner_without_a_thread():
    output = Output()
    with UnderWay(Console(file=output, force_terminal=True), "loading") as work:
        work.update("counting")
        assert not [t for t in threading.enumerate() if t.name == "under-way"]
    assert "counting" in output.getvalue()
