"""Progress output of a run for the user."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

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
from raymm.plural import plural

if TYPE_CHECKING:
    from raymm.data import Skipped

# Seconds between two updates of a notebook's output.
NOTEBOOK_EVERY_S = 0.2
# Seconds without a line, where there is no bar, after which progress is printed.
SILENCE_S = 20.0
T = TypeVar("T")


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


class RunProgress:
    """Progress bar on a terminal or in a notebook, and printed lines.

    Args:
        done: steps taken before this start.
    """

    def __init__(self, steps: int, done: int, console: Console) -> None:
        self._console = console
        self._steps, self._done, self._loss, self._not_applied = steps, done, "-", 0
        self._spoke = time.monotonic()
        self._bar = progress_bar(console, "train", done)

    def __enter__(self) -> RunProgress:
        self._show()
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def _show(self) -> None:
        text = f"loss {self._loss}"
        if self._not_applied:
            text += f"  {self._not_applied} not applied"
        self._bar.show(self._done, self._steps, text)

    def rewind(self, done: int) -> None:
        """Set the number of completed steps back, because later steps are repeated."""
        self._done = done
        self._show()

    def advance(self, loss: float) -> None:
        """Count one more completed step."""
        self._done, self._loss = self._done + 1, f"{loss:.4f}"
        self._show()

    def over(self, batches: Iterable[T], text: str) -> Iterator[T]:
        """Yield the batches of a long part of the run, and report how many are done: next to the
        bar, or in a line where there is no bar and no line for :data:`SILENCE_S` seconds."""
        began = time.monotonic()
        for done, batch in enumerate(batches):
            state = f"{text}: {plural(done, 'batch', 'es')} done"
            self._bar.show(self._done, self._steps, state)
            if self.is_silent:
                self.line(f"{state} ({time.monotonic() - began:.0f} s)")
            yield batch
        self._show()

    @property
    def is_silent(self) -> bool:
        """True if the console has no bar, and nothing was printed for :data:`SILENCE_S` seconds."""
        has_bar = self._console.is_terminal or self._console.is_jupyter
        return not has_bar and time.monotonic() - self._spoke >= SILENCE_S

    def not_applied(self, text: str) -> None:
        """Print why a step was not applied, and count it next to the bar."""
        self._not_applied += 1
        self._show()
        self.line(text)

    def line(self, text: str) -> None:
        """Print a line above the bar; in a notebook, below it."""
        self._spoke = time.monotonic()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class ScanProgress:
    """Progress bar for the scan of the training data, on a terminal or in a notebook."""

    def __init__(self, console: Console) -> None:
        self._bar = progress_bar(console, "scanning samples", transient=True)

    def __enter__(self) -> ScanProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        self._bar.show(done, total)


def step_line(row: Mapping[str, Any], steps: int, speed: float) -> str:
    """Return a line about a step: loss, speed (tokens per second, if the data have any), load of
    stages, balance of microbatches."""
    busy = "  ".join(f"{name} {share:.0%}" for name, share in row["stage_busy"].items())
    balance = row.get("balance", {})
    if balance.get("microbatches", 1) > 1:
        busy += f"  balance: {balance['efficiency']:.0%} (measured {balance['measured']:.0%}"
        if "error" in balance.get("costs", {}):
            busy += f", costs off by {balance['costs']['error']:.0%}"
        busy += ")"
    return (
        f"step {row['step']:>5}/{steps}  loss {row['loss']:.4f}  "
        f"{f'{speed:,.0f} tokens/s  ' if speed else ''}{_utilisation(row)}"
        f"grad norm {row['grad_norm']:.3g}  busy: {busy}"
    )


def _utilisation(row: Mapping[str, Any]) -> str:
    return f"MFU {row['mfu']['total']:.1%}  " if "mfu" in row else ""


def skipped_line(step: int, sample: Skipped) -> str:
    """Return a line about a skipped sample."""
    where = f" ({sample.path})" if sample.path else ""
    return f"step {step:>5}  skipped sample {sample.id!r}{where}: {sample.reason}"


def heldout_line(row: Mapping[str, Any]) -> str:
    """Return a line about a held-out evaluation, with the gap of each shuffled modality."""
    phrases = [f"step {row['step']:>5}  held-out loss {row['heldout_loss']:.4f}"]
    for key, value in row.items():
        if key.startswith("heldout_loss_shuffled_"):
            name = key.removeprefix("heldout_loss_shuffled_")
            gap = row[f"heldout_gap_{name}"]
            phrases.append(f"with shuffled {name} {value:.4f} (gap {gap:+.4f})")
    return "  ".join(phrases)


def texts_line(row: Mapping[str, Any]) -> str:
    """Return a line about an evaluation of generated text."""
    metrics = [
        f"{name.removeprefix('heldout_')} {value:.4g}" for name, value in row.items()
        if name.startswith("heldout_")
    ]
    return f"step {row['step']:>5}  {row['texts']} texts: {', '.join(metrics)} ({row['table']})"
