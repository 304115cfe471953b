"""Picture of a multiplexed mapping: a row per GPU, with bars as high as the modules' quotas."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from raymm.draw.palette import FAINT, RGB, TEXT, ink_on, module_hues
from raymm.draw.row_table import time_text
from raymm.draw.save import new_figure, picture_path, save_figure, text_width
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.multiplex.mapping import module_seconds
from raymm.scheduler.multiplex.problem import MappingProblem

# Sizes in inches, font sizes in points.
BAND, BAND_LEAST, BANDS_HEIGHT = 0.85, 0.16, 24.0
GAP = 0.12  # fraction of a row between rows
BODY = 9.0
HEAD, STAGES, AXIS, LEGEND_ROW, LINE = 0.42, 0.26, 0.50, 0.24, 0.20
LABEL, SMALL = 8.5, 7.5
IDLE = "#F1F1F1"
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def draw_mapping(
    problem: MappingProblem,
    mapping: StageMapping,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    note: str = "",
) -> Path:
    """Draw each module's share of each GPU over time, and return the path.

    Time goes to the right. A bar is a module's forward and backward, as wide as its time next to
    the other modules and as high as its quota. Grey areas are idle. Lines separate stages, and the
    predicted time is below the title, followed by ``note``. Raise a ``ValueError`` for another file
    suffix.

    Args:
        title: heading; by default the mapping's method.
    """
    target = picture_path(path)
    hues = module_hues(problem.names)
    second, unit = next(((s, u) for s, u in UNITS if mapping.seconds >= s), UNITS[-1])
    band = max(BAND_LEAST, min(BAND, BANDS_HEIGHT / mapping.gpus))
    ruler = new_figure(1, 1)
    labels = [f"GPU {gpu}" for gpu in range(mapping.gpus)]
    left = 0.25 + max(text_width(ruler, label, LABEL) for label in labels)
    handles = [
        Patch(facecolor=hues[name], label=name) for name in problem.names
    ] + [Patch(facecolor=IDLE, edgecolor=FAINT, label="idle")]
    widest = max(text_width(ruler, str(h.get_label()), LABEL) for h in handles) + 0.55
    columns = max(1, min(len(handles), int(BODY / widest)))
    summary = _summary(mapping, note, ruler)
    legend = LEGEND_ROW * -(-len(handles) // columns) + 0.12
    head = HEAD + LINE * len(summary) + STAGES
    width, height = left + BODY + 0.3, head + band * mapping.gpus + AXIS + legend
    figure = new_figure(width, height)
    figure.text(0.12 / width, 1 - 0.26 / height, title or f"mapping: {mapping.method}",
                fontsize=12, weight="bold", color=TEXT, va="center")
    for index, line in enumerate(summary):
        figure.text(0.12 / width, 1 - (HEAD + 0.06 + LINE * index) / height, line, fontsize=9,
                    color=TEXT, va="center")
    axes = figure.add_axes((
        left / width, (AXIS + legend) / height, BODY / width, band * mapping.gpus / height
    ))
    _frame(axes, mapping, labels, second, unit)
    _bars(axes, problem, mapping, hues, second, band)
    figure.legend(
        handles=handles, ncols=columns, loc="lower left", fontsize=LABEL, frameon=False,
        bbox_to_anchor=(left / width, 0.02), borderaxespad=0.0, handlelength=1.6,
        columnspacing=1.4,
    )
    return save_figure(figure, target)


def _summary(mapping: StageMapping, note: str, ruler) -> list[str]:
    phrases = [f"predicted {time_text(mapping.seconds)}" + (f" ({note})" if note else "")]
    if mapping.bound:
        phrases.append("proven optimal" if mapping.optimal else f"gap at most {mapping.gap:.1%}")
    lines = [phrases[0]]
    for phrase in phrases[1:]:
        extended = f"{lines[-1]}  ·  {phrase}"
        if text_width(ruler, extended, 9) <= BODY + 0.3:
            lines[-1] = extended
        else:
            lines.append(phrase)
    return lines


def _frame(axes: Axes, mapping: StageMapping, labels: list[str], second: float, unit: str) -> None:
    end = mapping.seconds / second
    axes.set_xlim(0, end)
    axes.set_ylim(mapping.gpus, 0)
    axes.set_yticks([gpu + 0.5 for gpu in range(mapping.gpus)], labels, fontsize=LABEL, color=TEXT)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=LABEL, colors=TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.set_xlabel(f"time ({unit}), forward and backward of each module in one bar", fontsize=9,
                    color=TEXT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for gpu in range(mapping.gpus):
        axes.add_patch(Rectangle(
            (0, gpu + GAP / 2), end, 1 - GAP, facecolor=IDLE, edgecolor="none", zorder=0
        ))
    start = 0.0
    for index, stage in enumerate(mapping.stages):
        if index:
            axes.axvline(start / second, color=TEXT, linewidth=1.0, linestyle=(0, (4, 3)), zorder=3)
        share = stage.seconds / mapping.seconds * BODY
        if share > 0.55 or (share > 0.12 and index < 100):
            axes.annotate(
                f"stage {index}" if share > 0.55 else str(index),
                ((start + stage.seconds / 2) / second, 0), xytext=(0, 4),
                textcoords="offset points", ha="center", va="bottom", fontsize=LABEL, color=FAINT,
                annotation_clip=False,
            )
        start += stage.seconds


def _bars(
    axes: Axes, problem: MappingProblem, mapping: StageMapping, hues: Mapping[str, RGB],
    second: float, band: float,
) -> None:
    ruler = axes.get_figure(root=True)
    assert ruler is not None
    start = 0.0
    for stage in mapping.stages:
        filled = [0.0] * mapping.gpus
        times = module_seconds(problem, stage.placements, mapping.slices)
        for placement, seconds in zip(stage.placements, times, strict=True):
            share = placement.quota / mapping.steps
            text = f"{placement.module}  {share:.0%}"
            inches = seconds / mapping.seconds * BODY
            size = min(SMALL, share * (1 - GAP) * band * 72 * 0.85)
            for gpu in placement.gpus:
                high = share * (1 - GAP)
                low = gpu + GAP / 2 + filled[gpu]
                axes.add_patch(Rectangle(
                    (start / second, low), seconds / second, high, facecolor=hues[placement.module],
                    edgecolor="white", linewidth=0.8, zorder=2,
                ))
                filled[gpu] += high
                for label in (text, placement.module, f"{share:.0%}"):
                    if size >= 4.5 and text_width(ruler, label, size) + 0.08 <= inches:
                        colour = ink_on(hues[placement.module])
                        axes.text(
                            (start + seconds / 2) / second, low + high / 2, label, ha="center",
                            va="center_baseline", fontsize=size, color=colour, zorder=4,
                        )
                        break
        start += stage.seconds
