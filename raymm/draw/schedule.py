"""The picture of a step: what every rank did when, predicted and measured below each other."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from raymm.draw.palette import (
    COLLECTIVE,
    FAINT,
    RGB,
    TEXT,
    WAIT,
    ink_on,
    module_hues,
    shade,
    tint,
)
from raymm.draw.save import new_figure, picture_path, save_figure, text_width
from raymm.scheduler.program import COMPUTE, EPILOGUE, Op
from raymm.scheduler.timeline import Span, Timeline

# Sizes in inches, font sizes in points.
ROW = 0.30
ROW_MANY = 0.24  # per row when there are more than MANY_ROWS
MANY_ROWS = 10
TITLE = 0.42  # above each panel
AXIS = 0.52  # below the last panel: tick labels and axis label
HEAD = 0.40  # the picture's title
LEGEND_ROW = 0.22
BUBBLES = 0.85  # right of the panels
MIN_WIDTH, MAX_WIDTH = 8.0, 24.0  # of the panels, without the margins
BOX = 0.17  # how wide the median compute box should at least be
LABEL_SIZE = 8.5
NUMBER_SIZES = (7.5, 6.5, 5.5, 4.8)  # the largest that fits its box is taken
LABEL_STAGES = 3  # more stages on a rank than this are counted, not named


def draw_timelines(
    timelines: Sequence[tuple[str, Timeline]],
    path: str | os.PathLike[str],
    *,
    rank_names: Mapping[int, str] | None = None,
    title: str | None = None,
) -> Path:
    """Draw timelines of one step on one time axis, a panel each, a row per rank.

    Forward boxes are light and backward boxes dark in their module's hue, forwards under
    ``no_grad`` are pale with an outline; thin grey lines are waits for a message. At the
    right of each row stands the rank's bubble, in the panel's title the makespan. Every
    timeline is moved to begin at 0, so that a late start does not look like a slow step.

    Args:
        timelines: (label, timeline) pairs, e.g. ``[("predicted", p), ("measured", m)]``.
        path: file to write, ``.png`` or ``.svg``.
        rank_names: row labels; by default each rank with the stages it ran.
        title: heading of the picture.

    Returns:
        The path written.

    Raises:
        ValueError: without a timeline, or on another file suffix.
    """
    target = picture_path(path)
    if not timelines:
        raise ValueError("timelines is empty; at least one (label, timeline) pair is needed")
    names = _row_names(timelines, rank_names)
    hues = module_hues(_module(s.stage) for _, t in timelines for s in t.compute())
    end = max(timeline.makespan for _, timeline in timelines) * 1e3 or 1.0
    handles, columns = _legend(timelines, hues)

    rows = [max(timeline.num_ranks, 1) for _, timeline in timelines]
    row = ROW if max(rows) <= MANY_ROWS else ROW_MANY
    ruler = new_figure(1, 1)
    left = 0.25 + max([text_width(ruler, name, LABEL_SIZE) for name in names.values()] or [0.0])
    body = min(max(MIN_WIDTH, end / _median_box(timelines) * BOX), MAX_WIDTH)
    legend = LEGEND_ROW * -(-len(handles) // columns) + 0.12 if handles else 0.0
    head = HEAD if title else 0.08
    width = left + body + BUBBLES
    height = head + sum(TITLE + row * n for n in rows) + AXIS + legend
    figure = new_figure(width, height)
    if title:
        figure.text(0.12 / width, 1 - 0.28 / height, title, fontsize=12, weight="bold",
                    color=TEXT, va="center")
    top = height - head
    for index, ((label, timeline), count) in enumerate(zip(timelines, rows, strict=True)):
        bottom = top - TITLE - row * count
        axes = figure.add_axes(
            (left / width, bottom / height, body / width, row * count / height)
        )
        _panel(axes, timeline, names, hues, end, body / end)
        axes.set_title(_caption(label, timeline, timelines[0] if index else None),
                       loc="left", fontsize=10, color=TEXT, pad=5)
        if index < len(timelines) - 1:
            axes.tick_params(labelbottom=False, bottom=False)
        else:
            axes.set_xlabel("time (ms)", fontsize=9, color=TEXT)
        top = bottom
    if handles:
        figure.legend(
            handles=handles, ncols=columns, loc="lower left", fontsize=8, frameon=False,
            bbox_to_anchor=(left / width, 0.02), borderaxespad=0.0, handlelength=1.6,
            labelspacing=0.45, columnspacing=1.6,
        )
    return save_figure(figure, target)


def _module(stage: str) -> str:
    return stage.rsplit(".", 1)[0]


def _row_names(
    timelines: Sequence[tuple[str, Timeline]], given: Mapping[int, str] | None
) -> dict[int, str]:
    stages: dict[int, dict[str, None]] = {}
    for _, timeline in timelines:
        for rank in range(timeline.num_ranks):
            stages.setdefault(rank, {})
        for span in timeline.compute():
            stages[span.rank][span.stage] = None
    names = {}
    for rank, on_rank in stages.items():
        shown = sorted(on_rank)
        more = len(shown) - LABEL_STAGES
        if more > 0:
            shown = [*shown[:LABEL_STAGES], f"+{more}"]
        default = f"rank {rank}: {' '.join(shown)}" if shown else f"rank {rank}"
        names[rank] = (given or {}).get(rank, default)
    return names


def _caption(label: str, timeline: Timeline, first: tuple[str, Timeline] | None) -> str:
    bubbles = [timeline.bubble(rank) for rank in range(timeline.num_ranks)]
    mean = sum(bubbles) / len(bubbles) if bubbles else 0.0
    caption = f"{label}: makespan {timeline.makespan * 1e3:,.4g} ms, mean bubble {mean:.0%}"
    if first is not None and first[1].makespan:
        caption += f" ({timeline.makespan / first[1].makespan - 1:+.1%} against {first[0]})"
    return caption


def _median_box(timelines: Sequence[tuple[str, Timeline]]) -> float:
    """Milliseconds of the median compute span; infinite when there is none."""
    lengths = sorted(s.end - s.start for _, t in timelines for s in t.compute() if s.end > s.start)
    return lengths[len(lengths) // 2] * 1e3 if lengths else float("inf")


def _fill(op: str, hue: RGB) -> RGB:
    if op == Op.BACKWARD:
        return shade(hue, 0.25)
    return tint(hue, 0.86 if op == Op.FORWARD_NO_GRAD else 0.50)


def _edge(op: str, hue: RGB) -> RGB | str:
    return hue if op == Op.FORWARD_NO_GRAD else "white"


def _legend(
    timelines: Sequence[tuple[str, Timeline]], hues: Mapping[str, RGB]
) -> tuple[list[Patch], int]:
    """Legend entries, column by column (a column is a module), and the number of columns."""
    spans = [span for _, timeline in timelines for span in timeline.spans]
    used = {(_module(span.stage), span.op) for span in spans if span.op in COMPUTE}
    names = {Op.FORWARD: "forward", Op.FORWARD_NO_GRAD: "forward, no grad", Op.BACKWARD: "backward"}
    blank = Patch(alpha=0.0, label="")
    columns: list[list[Patch]] = []
    for module, hue in hues.items():
        columns.append([
            Patch(facecolor=_fill(op, hue), edgecolor=_edge(op, hue), linewidth=0.8,
                  label=f"{module} {name}")
            for op, name in names.items() if (module, op) in used
        ])
    other = []
    if any(span.op == Op.RECV for span in spans):
        other.append(Patch(facecolor=WAIT, label="waiting for a message"))
    if any(span.op in EPILOGUE for span in spans):
        other.append(Patch(facecolor=COLLECTIVE, label="reduce, clip, optimizer step"))
    if other:
        columns.append(other)
    height = max((len(column) for column in columns), default=0)
    handles = [h for column in columns for h in [*column, *[blank] * (height - len(column))]]
    return handles, max(len(columns), 1)


def _panel(
    axes: Axes, timeline: Timeline, names: Mapping[int, str], hues: Mapping[str, RGB],
    end: float, inches_per_ms: float,
) -> None:
    count = max(timeline.num_ranks, 1)
    axes.set_xlim(0.0, end)
    axes.set_ylim(count - 0.5, -0.5)  # rank 0 on top
    axes.set_yticks(range(timeline.num_ranks), [names[r] for r in range(timeline.num_ranks)])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 2.5, 5, 10]))
    axes.tick_params(axis="y", length=0, labelsize=LABEL_SIZE, labelcolor=TEXT)
    axes.tick_params(axis="x", labelsize=8, labelcolor=TEXT, color=FAINT)
    axes.grid(axis="x", color="#ECECEC", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#BBBBBB")
    place = axes.get_yaxis_transform()  # x in widths of the panel, y in rows
    inches = end * inches_per_ms
    for rank in range(timeline.num_ranks):
        axes.axhline(rank, color="#F3F3F3", linewidth=0.7, zorder=0)
        axes.text(1 + 0.62 / inches, rank, f"{timeline.bubble(rank):.0%}", transform=place,
                  fontsize=8, color=TEXT, va="center", ha="right")
    axes.text(1 + 0.62 / inches, 1 + 0.07 / (axes.get_position().height * _height(axes)),
              "bubble", transform=axes.transAxes, fontsize=8, color=FAINT, ha="right",
              va="bottom")
    _boxes(axes, timeline, hues, inches_per_ms)


def _height(axes: Axes) -> float:
    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure.get_size_inches()[1]


def _boxes(
    axes: Axes, timeline: Timeline, hues: Mapping[str, RGB], inches_per_ms: float
) -> None:
    origin = min((span.start for span in timeline.spans), default=0.0)
    polygons, fills, edges = [], [], []
    numbers: list[tuple[float, float, float, Span, RGB]] = []
    # Waits lie below everything, outlined boxes above their neighbours' white borders.
    layers = {Op.RECV: 0, Op.FORWARD_NO_GRAD: 2}
    for span in sorted(timeline.spans, key=lambda s: layers.get(s.op, 1)):
        start, stop = (span.start - origin) * 1e3, (span.end - origin) * 1e3
        if span.op in COMPUTE:
            hue = hues[_module(span.stage)]
            half, fill, edge = 0.42, _fill(span.op, hue), _edge(span.op, hue)
            numbers.append((start, stop, span.rank, span, fill))
        elif span.op == Op.RECV:
            half, fill, edge = 0.06, WAIT, "none"
        elif span.op in EPILOGUE:
            half, fill, edge = 0.30, COLLECTIVE, "white"
        else:  # a SEND only starts a transfer
            continue
        low, high = span.rank - half, span.rank + half
        polygons.append([(start, low), (stop, low), (stop, high), (start, high)])
        fills.append(fill)
        edges.append(edge)
    thin = min([0.6, *((stop - start) * inches_per_ms * 10 for start, stop, *_ in numbers)])
    axes.add_collection(
        PolyCollection(polygons, facecolors=fills, edgecolors=edges, linewidths=max(thin, 0.15))
    )
    size = _number_size([((stop - start) * inches_per_ms, span) for start, stop, _, span, _ in
                         numbers])
    for start, stop, rank, span, fill in numbers:
        if _fits((stop - start) * inches_per_ms, span, size):
            axes.add_artist(
                Text((start + stop) / 2, rank, str(span.microbatch), fontsize=size,
                     color=ink_on(fill), ha="center", va="center_baseline", clip_on=True)
            )


def _fits(inches: float, span: Span, size: float) -> bool:
    digit = 0.64 / 72  # inches of a digit per point of font size
    return inches >= len(str(span.microbatch)) * digit * size + 0.02


def _number_size(boxes: Sequence[tuple[float, Span]]) -> float:
    """One font size for all microbatch numbers: the largest at which most boxes have room."""
    for size in NUMBER_SIZES:
        if sum(_fits(inches, span, size) for inches, span in boxes) >= 0.9 * len(boxes):
            return size
    return NUMBER_SIZES[-1]
