"""Progress bars for terminals and notebooks; other consoles show none."""

from __future__ import annotations

import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from raymm.draw.notebook import progress_html

# Seconds between two updates of a notebook's output.
NOTEBOOK_EVERY_S = 0.2


class ProgressBar(Protocol):
    """Progress bar."""

    def start(self) -> None:
        """Show the bar."""
        ...

    def stop(self) -> None:
        """Show the final state."""
        ...

    def show(self, done: int, total: int | None, text: str = "") -> None:
        """Update the bar. ``total`` is None if unknown; ``text`` is shown after the bar."""
        ...


def progress_bar(
    console: Console, name: str, done: int = 0, transient: bool = False
) -> ProgressBar:
    """Return a bar for a console, which shows it only on a terminal or in a notebook.

    Args:
        done: units completed before the start.
        transient: True to remove the bar when it stops.
    """
    if console.is_jupyter:
        return _NotebookBar(name, done, transient)
    return _TerminalBar(console, name, done, transient)


class _TerminalBar:
    def __init__(self, console: Console, name: str, done: int, transient: bool) -> None:
        self._bar = Progress(
            TextColumn(f"[bold]{name}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(),
            console=console, transient=transient, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(name, total=None, completed=done, text="")

    def start(self) -> None:
        self._bar.start()

    def stop(self) -> None:
        self._bar.stop()

    def show(self, done: int, total: int | None, text: str = "") -> None:
        self._bar.update(self._task, completed=done, total=total, text=text)


class _NotebookBar:
    """Output of a cell that is updated in place. Later output appears below it."""

    def __init__(self, name: str, done: int, transient: bool) -> None:
        self._name, self._transient = name, transient
        self._first, self._done, self._total, self._text = done, done, None, ""
        self._started = self._shown_at = time.monotonic()
        self._output: Any = None

    def start(self) -> None:
        from IPython.display import display  # installed, because this is a notebook

        self._started = time.monotonic()
        self._output = display(self, display_id=True)

    def show(self, done: int, total: int | None, text: str = "") -> None:
        self._done, self._total, self._text = done, total, text
        if time.monotonic() - self._shown_at >= NOTEBOOK_EVERY_S:
            self._update()

    def stop(self) -> None:
        if self._transient:
            self._name = ""
        self._update()

    def _update(self) -> None:
        self._shown_at = time.monotonic()
        if self._output is not None:
            self._output.update(self)

    def __repr__(self) -> str:
        return f"{self._name} {self._done}/{self._total}  {self._text}" if self._name else ""

    def _repr_html_(self) -> str:
        if not self._name:
            return ""
        seconds = time.monotonic() - self._started
        phrases = [self._name, self._text, f"{seconds:.0f} s"]
        done = self._done - self._first
        if done and self._total is not None and self._done < self._total:
            phrases.append(f"{seconds / done * (self._total - self._done):.0f} s left")
        return progress_html(self._done, self._total, " · ".join(filter(None, phrases)))
