"""Losses and throughput over time of a run in which things go wrong, beside the one without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trials import Trial

# Seconds of a bar of throughput.
BAR_S = 1.0
UNDISTURBED, SOAKED, KILLS = "#b8c0c8", "#1f5fbf", "#c0392b"


def draw_soak(undisturbed: Path, soaked: Path, trials: Sequence[Trial], file: Path) -> None:
    """Write the picture.

    Args:
        undisturbed, soaked: folders of runs.
        trials: what went wrong in the latter.
        file: ending in ``.png`` or ``.svg``.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    last = max(_times(soaked))
    figure, (by_step, by_time, speeds) = plt.subplots(3, 1, figsize=(9, 8))
    speeds.sharex(by_time)
    name = f"{len(trials)} times killed or disturbed"
    for run, label, color, width in (
        (undisturbed, "undisturbed", UNDISTURBED, 5.0), (soaked, name, SOAKED, 1.2),
    ):
        rows, clock = [row for row in _steps(run) if row["step"] <= last], _times(run)
        losses = [row["loss"] for row in rows]
        at = [clock[row["step"]] - min(clock.values()) for row in rows]
        by_step.plot([row["step"] for row in rows], losses, color=color, lw=width, label=label)
        by_time.plot(at, losses, color=color, lw=min(width, 2.5))
        bars = [0.0] * (int(at[-1] / BAR_S) + 2)
        for second, row in zip(at, rows, strict=True):
            bars[int(second / BAR_S)] += row["tokens"] / BAR_S
        edges = [n * BAR_S for n in range(len(bars))]
        speeds.step(edges, bars, where="post", color=color, lw=min(width, 2.5))
    start = min(_times(soaked).values())
    for trial in trials:
        if trial.at is not None:
            by_step.axvline(trial.last_step, color=KILLS, lw=0.7, ls=":")
            for axes in (by_time, speeds):
                axes.axvline(trial.at - start, color=KILLS, lw=0.7, ls=":")
    by_step.set(ylabel="loss", xlabel="step")
    by_time.set(ylabel="loss")
    speeds.set(ylabel=f"tokens/s, bars of {BAR_S:g} s", xlabel="seconds since the first step")
    by_step.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _steps(run: Path) -> list[Mapping[str, Any]]:
    from raymm.monitor.metrics import read_metrics

    return [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def _times(run: Path) -> dict[int, float]:
    """When every step was taken, the last time that it was."""
    lines = (run.parent / "times.txt").read_text().split()
    return {int(step): float(at) for step, _, at in (line.partition(":") for line in lines)}
