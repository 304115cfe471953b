"""The loss curve: training loss, and what each modality is worth on held-out samples."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from raymm.draw.palette import FAINT, TEXT, module_hues
from raymm.draw.save import new_figure, picture_path, save_figure, text_width

HELDOUT = "heldout_loss"
SHUFFLED = "heldout_loss_shuffled_"

TRAIN_COLOUR = "#8A8A8A"
HELDOUT_COLOUR = "#111111"
SMOOTH_PART = 0.05  # the smoothed curve averages over this part of the run

# Inches; font sizes in points.
LEFT, PLOT_WIDTH, LABEL_GAP = 0.75, 7.6, 0.14
LOSS_HEIGHT, GAP_HEIGHT, TITLE, BETWEEN, BOTTOM = 3.6, 1.7, 0.45, 0.42, 0.55
LABEL_SIZE = 9
LINE = 0.19  # inches between labels at the right


def draw_loss(
    history: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> Path:
    """Draw the loss over steps, in nats per label token.

    The training loss is thin, with a smoothed line over it. Held-out loss is drawn with
    each sample's own inputs and, per modality, with that input exchanged between samples;
    a second panel shows the gap between the two, which is what the model has learnt from
    the modality. The curves' last values and gaps are written at the right.

    Args:
        history: rows with ``"step"`` and any of ``"loss"``, ``"heldout_loss"`` and
            ``"heldout_loss_shuffled_<modality>"``; what is missing, None or not finite
            is left out, other keys are ignored.
        path: file to write, ``.png`` or ``.svg``.
        title: heading of the picture.

    Returns:
        The path written.

    Raises:
        ValueError: on another file suffix.
        KeyError: if a row has no ``"step"``.
    """
    target = picture_path(path)
    train = _series(history, "loss")
    heldout = _series(history, HELDOUT)
    modalities = sorted({
        key.removeprefix(SHUFFLED) for row in history for key in row if key.startswith(SHUFFLED)
    })
    shuffled = {m: _series(history, SHUFFLED + m) for m in modalities}
    gaps = {m: _gap(curve, heldout) for m, curve in shuffled.items()}
    hues = module_hues(modalities)

    labels: list[tuple[float, str, Any]] = []  # (value at the end, text, colour)
    if train:
        smooth = _smooth(train)
        labels.append((smooth[-1][1], f"train {smooth[-1][1]:.3f}", TRAIN_COLOUR))
    if heldout:
        labels.append((heldout[-1][1], f"held-out {heldout[-1][1]:.3f}", HELDOUT_COLOUR))
    for name, curve in shuffled.items():
        if curve:
            labels.append((curve[-1][1], f"{name} shuffled {curve[-1][1]:.3f}", hues[name]))
    gap_labels = [
        (gap[-1][1], f"{name} gap {gap[-1][1]:+.3f}", hues[name])
        for name, gap in gaps.items() if gap
    ]

    ruler = new_figure(1, 1)
    widths = [text_width(ruler, text, LABEL_SIZE) for _, text, _ in [*labels, *gap_labels]]
    width = LEFT + PLOT_WIDTH + 2 * LABEL_GAP + max(widths, default=0.0)
    lower = BETWEEN + GAP_HEIGHT if gap_labels else 0.0
    height = TITLE + LOSS_HEIGHT + lower + BOTTOM
    figure = new_figure(width, height)
    figure.text(LEFT / width, 1 - TITLE / 2 / height, title or "Loss", fontsize=12,
                weight="bold", color=TEXT, va="center")

    upper = figure.add_axes(
        (LEFT / width, (BOTTOM + lower) / height, PLOT_WIDTH / width, LOSS_HEIGHT / height)
    )
    if train:
        upper.plot(*zip(*train, strict=True), color=TRAIN_COLOUR, linewidth=0.6, alpha=0.55)
        upper.plot(*zip(*smooth, strict=True), color=TRAIN_COLOUR, linewidth=2.0,
                   marker="o" if len(smooth) == 1 else None, markersize=5)
    if heldout:
        upper.plot(*zip(*heldout, strict=True), color=HELDOUT_COLOUR, linewidth=1.8, marker="o",
                   markersize=3.2)
    for name, curve in shuffled.items():
        if curve:
            upper.plot(*zip(*curve, strict=True), color=hues[name], linewidth=1.8,
                       linestyle="--", marker="o", markersize=3.2)
    if not labels:
        upper.text(0.5, 0.5, "no loss recorded", transform=upper.transAxes, ha="center",
                   color=FAINT)
    every = [train, heldout, *shuffled.values()]
    _finish(upper, every, labels, LOSS_HEIGHT, "loss (nats per label token)")
    if gap_labels:
        axes = figure.add_axes(
            (LEFT / width, BOTTOM / height, PLOT_WIDTH / width, GAP_HEIGHT / height)
        )
        for name, gap in gaps.items():
            if gap:
                axes.plot(*zip(*gap, strict=True), color=hues[name], linewidth=1.8, marker="o",
                          markersize=3.2)
        axes.axhline(0.0, color="#BBBBBB", linewidth=0.8, zorder=1)
        _finish(axes, every, gap_labels, GAP_HEIGHT, "shuffled − right (nats)")
        upper.tick_params(labelbottom=False)
        axes.set_xlabel("step", fontsize=9, color=TEXT)
    else:
        upper.set_xlabel("step", fontsize=9, color=TEXT)
    return save_figure(figure, target)


def _series(history: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    points = []
    for row in history:
        value = row.get(key)
        if value is not None and math.isfinite(value):
            points.append((row["step"], float(value)))
    return points


def _gap(
    shuffled: list[tuple[float, float]], right: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    at = dict(right)
    return [(step, value - at[step]) for step, value in shuffled if step in at]


def _smooth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Exponential average without the usual bias towards the first value."""
    keep = 1.0 - 1.0 / max(1.0, SMOOTH_PART * len(points))
    total, weight, smooth = 0.0, 0.0, []
    for step, value in points:
        total = keep * total + value
        weight = keep * weight + 1.0
        smooth.append((step, total / weight))
    return smooth


def _finish(
    axes: Axes,
    curves: Sequence[Sequence[tuple[float, float]]],
    labels: list[tuple[float, str, Any]],
    height: float,
    name: str,
) -> None:
    steps = [step for curve in curves for step, _ in curve]
    if steps:
        low, high = min(steps), max(steps)
        room = 0.02 * (high - low) or 0.5
        axes.set_xlim(low - room, high + room)
    axes.set_ylabel(name, fontsize=9, color=TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
    axes.tick_params(labelsize=8, labelcolor=TEXT, color=FAINT)
    axes.grid(color="#ECECEC", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#BBBBBB")
    bottom, top = axes.get_ylim()
    wanted = [(value - bottom) / (top - bottom) * height for value, _, _ in labels]
    for y, (_, text, colour) in zip(_spread(wanted, height), labels, strict=True):
        axes.text(1 + LABEL_GAP / PLOT_WIDTH, y / height, text, transform=axes.transAxes,
                  color=colour, fontsize=LABEL_SIZE, va="center", weight="bold")


def _spread(wanted: list[float], height: float) -> list[float]:
    """The places nearest to the wanted ones, in their order, at least a line apart and,
    as far as there is room, within the height."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    placed = [0.0] * len(wanted)
    floor = 0.0
    for i in order:
        placed[i] = floor = max(wanted[i], floor)
        floor += LINE
    ceiling = height
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - LINE
    return placed
