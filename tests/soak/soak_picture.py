"""Picture of a soak: losses of all parts, faults by step, and throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.soak.soak_places import FILES, LIMITS, SMALL_DISK, STOPPED
from tests.soak.trials import Trial

# Seconds per bar of throughput.
BAR_S = 1.0
UNDISTURBED, KILLS = "#b8c0c8", "#c0392b"
PART_COLORS = ("#1f5fbf", "#d9822b", "#2e8b57", "#8e44ad")
SERVERS = ("raylet", "GCS", "agent", "node")
# Longer names of kinds.
NAMES = {
    STOPPED: "SIGSTOP for 1.5 s", "NaN input": "inputs not finite",
    LIMITS[0]: "no file descriptors (prlimit)", LIMITS[1]: "no memory for threads (prlimit)",
    SMALL_DISK: "tmpfs filled and emptied", FILES[0]: "checkpoint moved, link in its place",
    FILES[1]: "FIFO as manifest",
}


def draw_soak(folder: Path, undisturbed: str, trials: Sequence[Trial], file: Path) -> None:
    """Write the picture.

    Args:
        folder: folder of the soak, with a folder for each part.
        undisturbed: name of the undisturbed part.
        trials: faults of all parts.
        file: output file, ending in ``.png`` or ``.svg``.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    trials = [trial for trial in trials if trial.at is not None]
    parts = list(dict.fromkeys(trial.part for trial in trials))
    kinds = sorted({_name(trial) for trial in trials})
    heights = [3.0, 0.6 + 0.24 * len(kinds), 2.2]
    figure, (losses, faults, speeds) = plt.subplots(
        3, 1, figsize=(10, sum(heights) + 1.2), height_ratios=heights
    )
    faults.sharex(losses)
    last = max(max(_times(folder / part)) for part in parts)
    _draw_losses(losses, folder / undisturbed, last, "undisturbed", UNDISTURBED, 5.0)
    for number, (part, color) in enumerate(zip(parts, PART_COLORS, strict=False)):
        there = [trial for trial in trials if trial.part == part]
        label = f"{part}: {len(there)} faults"
        _draw_losses(losses, folder / part, last, label, color, 2.2 - 0.5 * number)
        faults.scatter(
            [trial.last_step for trial in there], [kinds.index(_name(trial)) for trial in there],
            color=color, s=16, zorder=3,
        )
    losses.set(ylabel="loss", title=f"faults: {len(trials)}")
    losses.legend(fontsize=8)
    faults.set(xlabel="step", ylim=(len(kinds) - 0.5, -0.5))
    faults.set_yticks(range(len(kinds)), kinds, fontsize=8)
    faults.grid(axis="y", color="#e6e6e6")
    _draw_speed(speeds, folder / undisturbed, last, UNDISTURBED, 2.5)
    _draw_speed(speeds, folder / parts[0], last, PART_COLORS[0], 1.2)
    start = min(_times(folder / parts[0]).values())
    for trial in trials:
        if trial.part == parts[0]:
            speeds.axvline(trial.at - start, color=KILLS, lw=0.6, ls=":")
    speeds.set(ylabel=f"tokens/s, bars of {BAR_S:g} s",
               xlabel=f"seconds since the first step ({parts[0]}; dotted: a fault)")
    figure.tight_layout()
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _name(trial: Trial) -> str:
    kind = NAMES.get(trial.kind, trial.kind)
    return f"{trial.role}: {kind}" if trial.role in SERVERS else kind


def _draw_losses(axes: Any, part: Path, last: int, label: str, color: str, width: float) -> None:
    rows = [row for row in _steps(part) if row["step"] <= last]
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], color=color, lw=width,
              label=label)


def _draw_speed(axes: Any, part: Path, last: int, color: str, width: float) -> None:
    rows, clock = [row for row in _steps(part) if row["step"] <= last], _times(part)
    at = [clock[row["step"]] - min(clock.values()) for row in rows]
    bars = [0.0] * (int(max(at)) + 2)
    for second, row in zip(at, rows, strict=True):
        bars[int(second / BAR_S)] += row["tokens"] / BAR_S
    axes.step([n * BAR_S for n in range(len(bars))], bars, where="post", color=color, lw=width)


def _steps(part: Path) -> list[Mapping[str, Any]]:
    from raymm.monitor.metrics import read_metrics

    return [row for row in read_metrics(part / "run" / "metrics.jsonl") if "loss" in row]


def _times(part: Path) -> dict[int, float]:
    """Return the time of every step, the last time that it was run."""
    lines = (part / "times.txt").read_text().split()
    return {int(step): float(at) for step, _, at in (line.partition(":") for line in lines)}
