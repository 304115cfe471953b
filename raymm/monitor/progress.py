"""What a person sees while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from raymm.data import Skipped


class RunProgress:
    """A progress bar on a terminal, and one printed line per ``log_every`` steps anywhere.

    Args:
        steps: steps of the run in all.
        done: steps taken before this start.
        console: where to print.
    """

    def __init__(self, steps: int, done: int, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("[bold]train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}{task.fields[not_applied]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            "train", total=steps, completed=done, loss="-", not_applied=""
        )
        self._not_applied = 0

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def advance(self, loss: float) -> None:
        """One more step is done."""
        self._bar.update(self._task, advance=1, loss=f"{loss:.4f}")

    def not_applied(self, text: str) -> None:
        """A step was not applied: a line that says why, and a count beside the bar."""
        self._not_applied += 1
        self._bar.update(self._task, not_applied=f"  {self._not_applied} not applied")
        self.line(text)

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class ScanProgress:
    """A bar while the training data are scanned, on a terminal.

    Args:
        console: where to print.
    """

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("[bold]scanning samples"), BarColumn(), MofNCompleteColumn(),
            TimeRemainingColumn(), console=console, transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("scan", total=None)

    def __enter__(self) -> ScanProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """So many samples are done."""
        self._bar.update(self._task, completed=done, total=total)


def step_line(row: Mapping[str, Any], steps: int) -> str:
    """One line about a step: loss, speed, how busy each stage was, how alike microbatches."""
    busy = "  ".join(f"{name} {share:.0%}" for name, share in row["stage_busy"].items())
    alike = row.get("balance", {})
    if alike.get("microbatches", 1) > 1:
        busy += f"  balance: {alike['efficiency']:.0%} (measured {alike['measured']:.0%}"
        if "error" in alike.get("costs", {}):
            busy += f", costs off by {alike['costs']['error']:.0%}"
        busy += ")"
    return (
        f"step {row['step']:>5}/{steps}  loss {row['loss']:.4f}  "
        f"{row['tokens_per_s']:,.0f} tokens/s  {_utilisation(row)}"
        f"grad norm {row['grad_norm']:.3g}  busy: {busy}"
    )


def _utilisation(row: Mapping[str, Any]) -> str:
    return f"MFU {row['mfu']['total']:.1%}  " if "mfu" in row else ""


def skipped_line(step: int, sample: Skipped) -> str:
    """One line about a sample that was left out."""
    where = f" ({sample.path})" if sample.path else ""
    return f"step {step:>5}  skipped sample {sample.id!r}{where}: {sample.reason}"


def heldout_line(row: Mapping[str, Any]) -> str:
    """One line about a held-out evaluation, with the gap of each shuffled modality."""
    parts = [f"step {row['step']:>5}  held-out loss {row['heldout_loss']:.4f}"]
    for key, value in row.items():
        if key.startswith("heldout_loss_shuffled_"):
            name = key.removeprefix("heldout_loss_shuffled_")
            gap = row[f"heldout_gap_{name}"]
            parts.append(f"with shuffled {name} {value:.4f} (gap {gap:+.4f})")
    return "  ".join(parts)
