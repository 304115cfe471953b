"""Progress output of a run for the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from raymm.data import Skipped
from raymm.monitor.progress_bar import progress_bar


class RunProgress:
    """Progress bar on a terminal or in a notebook, and a printed line every ``log_every`` steps.

    Args:
        done: steps taken before this start.
    """

    def __init__(self, steps: int, done: int, console: Console) -> None:
        self._console = console
        self._steps, self._done, self._loss, self._not_applied = steps, done, "-", 0
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

    def not_applied(self, text: str) -> None:
        """Print why a step was not applied, and count it next to the bar."""
        self._not_applied += 1
        self._show()
        self.line(text)

    def line(self, text: str) -> None:
        """Print a line above the bar; in a notebook, below it."""
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
