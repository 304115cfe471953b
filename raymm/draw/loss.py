"""Loss curve: training loss, held-out loss, and the contribution of each modality."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from raymm.draw.palette import FAINT, TEXT, module_hues
from raymm.draw.save import new_figure, picture_path, save_figure, text_width

HELDOUT = "heldout_loss"
SHUFFLED = "heldout_loss_shuffled_"

TRAIN_COLOUR = "#8A8A8A"
HELDOUT_COLOUR = "#111111"
SMOOTH_PART = 0.05  # fraction of the run that the smoothed curve averages over

# Inches; font sizes in points.
LEFT, PLOT_WIDTH, LABEL_GAP = 0.75, 7.6, 0.14
LOSS_HEIGHT, GAP_HEIGHT, TITLE, BETWEEN, BOTTOM = 3.6, 1.7, 0.45, 0.42, 0.55
LABEL_SIZE = 9
LINE = 0.19  # height of a label at the right, in inches


def draw_loss(
    history: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, title: str | None = None
) -> Path:
    """Draw the loss over steps, in nats per label token, and return the path.

    The training loss is thin, with a smoothed line over it. Held-out loss is drawn with each
    sample's own inputs and, per modality, with these inputs exchanged between samples. A second
    panel shows the gap between the two, which is what the model has learnt from the modality. Last
    values are written at the right. Raise a ``ValueError`` for another file suffix, and a
    ``KeyError`` if a row has no ``"step"``.

    Args:
        history: rows with ``"step"`` and any of ``"loss"``, ``"heldout_loss"`` and
            ``"heldout_loss_shuffled_<modality>"``. Values that are missing, None or not finite are
            left out, and other keys are ignored.
    """
    target = picture_path(path)
    curves, gaps = _curves(history)
    labels = [curve.label for curve in curves]
    gap_labels = [gap.label for gap in gaps]

    ruler = new_figure(1, 1)
    widths = [text_width(ruler, label.text, LABEL_SIZE) for label in (*labels, *gap_labels)]
    width = LEFT + PLOT_WIDTH + 2 * LABEL_GAP + max(widths, default=0.0)
    lower = BETWEEN + GAP_HEIGHT if gaps else 0.0
    height = TITLE + LOSS_HEIGHT + lower + BOTTOM
    figure = new_figure(width, height)
    figure.text(LEFT / width, 1 - TITLE / 2 / height, title or "Loss", fontsize=12,
                weight="bold", color=TEXT, va="center")

    upper = figure.add_axes(
        (LEFT / width, (BOTTOM + lower) / height, PLOT_WIDTH / width, LOSS_HEIGHT / height)
    )
    for curve in curves:
        curve.draw(upper)
    if not curves:
        upper.text(0.5, 0.5, "no loss recorded", transform=upper.transAxes, ha="center",
                   color=FAINT)
    steps = [step for curve in curves for step, _ in curve.points]
    _finish(upper, steps, labels, LOSS_HEIGHT, "loss (nats per label token)")
    lowest = upper
    if gaps:
        lowest = figure.add_axes(
            (LEFT / width, BOTTOM / height, PLOT_WIDTH / width, GAP_HEIGHT / height)
        )
        for gap in gaps:
            gap.draw(lowest)
        lowest.axhline(0.0, color="#BBBBBB", linewidth=0.8, zorder=1)
        _finish(lowest, steps, gap_labels, GAP_HEIGHT, "shuffled − right (nats)")
        # Otherwise the numbers of small differences push the label out of the picture.
        lowest.ticklabel_format(axis="y", scilimits=(-2, 3))
        upper.tick_params(labelbottom=False)
    lowest.set_xlabel("step", fontsize=9, color=TEXT)
    return save_figure(figure, target)


class _Label(NamedTuple):
    """Label at the right of a curve, at the height of its last value."""

    value: float
    text: str
    colour: Any


class _Curve(NamedTuple):
    """A named curve of (step, value) points; ``raw`` has the unsmoothed points, drawn thinly
    below."""

    name: str
    points: list[tuple[float, float]]
    colour: Any
    style: dict[str, Any]  # keyword arguments of matplotlib's plot
    digits: str = ".3f"
    raw: tuple[tuple[float, float], ...] = ()

    @property
    def label(self) -> _Label:
        last = self.points[-1][1]
        return _Label(last, f"{self.name} {last:{self.digits}}", self.colour)

    def draw(self, axes: Axes) -> None:
        if self.raw:
            axes.plot(*zip(*self.raw, strict=True), color=self.colour, linewidth=0.6, alpha=0.55)
        axes.plot(*zip(*self.points, strict=True), color=self.colour, **self.style)


def _curves(history: Sequence[Mapping[str, Any]]) -> tuple[list[_Curve], list[_Curve]]:
    """Return the loss curves, and each modality's gap curve, without empty ones."""
    train = _series(history, "loss")
    heldout = _series(history, HELDOUT)
    modalities = sorted({
        key.removeprefix(SHUFFLED) for row in history for key in row if key.startswith(SHUFFLED)
    })
    hues = module_hues(modalities)
    marked = {"linewidth": 1.8, "marker": "o", "markersize": 3.2}
    smoothed = {"linewidth": 2.0, "marker": "o" if len(train) == 1 else None, "markersize": 5}
    losses = [
        _Curve("train", _smooth(train), TRAIN_COLOUR, smoothed, raw=tuple(train)),
        _Curve("held-out", heldout, HELDOUT_COLOUR, marked),
    ]
    gaps = []
    for modality in modalities:
        shuffled, hue = _series(history, SHUFFLED + modality), hues[modality]
        losses.append(_Curve(f"{modality} shuffled", shuffled, hue, {**marked, "linestyle": "--"}))
        gaps.append(_Curve(f"{modality} gap", _gap(shuffled, heldout), hue, marked, "+.3f"))
    return [curve for curve in losses if curve.points], [gap for gap in gaps if gap.points]


def _series(history: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """Return (step, value) for rows with a finite value."""
    points = []
    for row in history:
        value = row.get(key)
        if value is not None and math.isfinite(value):
            points.append((row["step"], float(value)))
    return points


def _gap(
    shuffled: list[tuple[float, float]], right: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    right_loss = dict(right)
    return [(step, value - right_loss[step]) for step, value in shuffled if step in right_loss]


def _smooth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return an exponential average without the bias towards the first value."""
    keep = 1.0 - 1.0 / max(1.0, SMOOTH_PART * len(points))
    total, weight, smooth = 0.0, 0.0, []
    for step, value in points:
        total = keep * total + value
        weight = keep * weight + 1.0
        smooth.append((step, total / weight))
    return smooth


def _finish(
    axes: Axes, steps: Sequence[float], labels: Sequence[_Label], height: float, name: str
) -> None:
    """Set limits, ticks and grid of a panel with the given height in inches, and draw its
    labels."""
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
    ends = [(label.value - bottom) / (top - bottom) * height for label in labels]
    for y, label in zip(_spread(ends, height), labels, strict=True):
        axes.text(1 + LABEL_GAP / PLOT_WIDTH, y / height, label.text, transform=axes.transAxes,
                  color=label.colour, fontsize=LABEL_SIZE, va="center", weight="bold")


def _spread(ends: list[float], height: float) -> list[float]:
    """Return positions near the curves' ends, in their order, at least one line apart and, if there
    is room, within the height; all in inches."""
    order = sorted(range(len(ends)), key=ends.__getitem__)
    placed = [0.0] * len(ends)
    floor = 0.0
    for i in order:
        placed[i] = floor = max(ends[i], floor)
        floor += LINE
    ceiling = height
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - LINE
    return placed
