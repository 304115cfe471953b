"""Lines about a run's progress where there is no bar."""

import io

import pytest
from rich.console import Console

from raymm.monitor import progress
from raymm.monitor.progress import RunProgress


@pytest.mark.parametrize("silence, lines", [(0.0, 3), (3600.0, 0)])
def test_long_parts_report_batches_after_a_silence(monkeypatch, silence, lines):
    monkeypatch.setattr(progress, "SILENCE_S", silence)
    text = io.StringIO()
    with RunProgress(5, 0, Console(file=text)) as shown:
        assert list(shown.over("abc", "held-out data")) == ["a", "b", "c"]
    said = text.getvalue().splitlines()
    assert len(said) == lines
    for done, line in zip(("0 batches", "1 batch", "2 batches"), said, strict=False):
        assert line.startswith(f"held-out data: {done} done (")


def test_a_terminal_has_a_bar_instead(monkeypatch):
    monkeypatch.setattr(progress, "SILENCE_S", 0.0)
    terminal = RunProgress(5, 0, Console(file=io.StringIO(), force_terminal=True))
    assert not terminal.is_silent and RunProgress(5, 0, Console(file=io.StringIO())).is_silent
