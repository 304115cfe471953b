"""Picture of a step: the work of every rank over time. Several timelines share one time axis."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from raymm.draw.palette import COLLECTIVE, FAINT, TEXT, WAIT, Look, module_hues, op_looks
from raymm.draw.save import new_figure, picture_path, save_figure, text_width
from raymm.draw.schedule_boxes import (
    TimeScale,
    draw_boxes,
    number_size,
    places_by_order,
    places_on_quotas,
)
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import COMPUTE, OPTIMIZER_OPS, Op
from raymm.scheduler.program.timeline import Timeline

# Sizes in inches, font sizes in points.
ROW = 0.30
ROW_MANY = 0.24  # per row when a panel has more than MANY_ROWS
MANY_ROWS = 10
ROW_LEAST, MAX_ROWS_HEIGHT = 0.10, 32.0  # rows shrink to this total height
TITLE = 0.42  # above each panel
AXIS = 0.52  # below the last panel: tick labels and axis label
HEAD = 0.40  # the picture's title
LEGEND_ROW = 0.22
BUBBLES = 0.85  # right of the panels
MIN_WIDTH, MAX_WIDTH = 8.0, 20.0  # of the panels, without the margins
BOX = 0.17  # minimum width of the median compute box
LABEL_SIZE, CAPTION_SIZE = 8.5, 10.0
LEGEND_SIZE = 8
LEGEND_BESIDE = 0.55  # width of an entry without its text, in inches
LABEL_STAGES = 3  # further stages of a rank are counted, not named

UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def draw_timelines(
    timelines: Sequence[tuple[str, Timeline]],
    path: str | os.PathLike[str],
    *,
    rank_names: Mapping[int, str] | None = None,
    title: str | None = None,
) -> Path:
    """Draw timelines of one step on one time axis, with a panel each and a row per rank, and return
    the path.

    Boxes have their module's hue, and are darker the later they are in a microbatch: forward,
    recompute (striped), backward of inputs, backward of weights. Forwards under ``no_grad`` are
    pale with an outline. If a rank has several stages of one module (chunks of an interleaved
    schedule, or replicas), boxes of later stages are lower. Boxes of modules that run side by side
    are below each other, each as high as its quota. Thin grey lines are waits for a message. The
    rank's bubble is at the right of each row. The panel's title has the iteration time and, from
    the second panel on, the gain against the first, whose end is a dashed line. All timelines start
    at 0, so that a late start does not look like a slow step. Raise a ``ValueError`` if there is no
    timeline, and for another file suffix.

    Args:
        timelines: (label, timeline) pairs, e.g. ``[("predicted", p), ("measured", m)]``.
        path: file to write, ``.png`` or ``.svg``.
        rank_names: row labels; by default each rank with its stages.
    """
    target = picture_path(path)
    if not timelines:
        raise ValueError("timelines is empty; at least one (label, timeline) pair is needed")
    on_rank = _stages_of_ranks(timelines)
    names = _row_names(on_rank, rank_names)
    boxes, looks = places_by_order(on_rank), _looks(timelines)
    rows = [max(timeline.num_ranks, 1) for _, timeline in timelines]
    row = _row_height(rows)
    label_size = min(LABEL_SIZE, row * 72 * 0.8)
    captions = _captions(timelines)

    ruler = new_figure(1, 1)
    left = 0.25 + max([text_width(ruler, name, label_size) for name in names.values()] or [0.0])
    captioned = [text_width(ruler, caption, CAPTION_SIZE) for caption in captions]
    body = max(_body(timelines), *(inches + 0.2 for inches in captioned))
    scale = _scale(timelines, body)
    digits = number_size(timelines, scale)
    entries = _legend(timelines, looks, any(box.rise for box in boxes.values()))
    handles, columns = _in_width(entries, body + BUBBLES)
    legend = LEGEND_ROW * -(-len(handles) // columns) + 0.12 if handles else 0.0
    head = HEAD if title else 0.08
    width = left + body + BUBBLES
    height = head + sum(TITLE + row * n for n in rows) + AXIS + legend
    figure = new_figure(width, height)
    if title:
        figure.text(0.12 / width, 1 - 0.28 / height, title, fontsize=12, weight="bold", color=TEXT,
                    va="center")
    top = height - head
    for index, ((_, timeline), count) in enumerate(zip(timelines, rows, strict=True)):
        bottom = top - TITLE - row * count
        box = (left / width, bottom / height, body / width, row * count / height)
        axes = figure.add_axes(box)
        _panel(axes, timeline, names, scale, label_size)
        draw_boxes(axes, timeline, looks, {**boxes, **places_on_quotas(timeline)}, scale, digits)
        axes.set_title(captions[index], loc="left", fontsize=CAPTION_SIZE, color=TEXT, pad=5)
        if index:
            _mark_end(axes, timelines[0], scale, captioned[index])
        if index < len(timelines) - 1:
            axes.tick_params(labelbottom=False, bottom=False)
        else:
            axes.set_xlabel(f"time ({scale.unit})", fontsize=9, color=TEXT)
        top = bottom
    if handles:
        _draw_legend(figure, handles, columns, left / width)
    return save_figure(figure, target)


def _row_height(rows: Sequence[int]) -> float:
    """Return the height of a row in inches, for panels with the given numbers of rows."""
    row = ROW if max(rows) <= MANY_ROWS else ROW_MANY
    return max(min(row, MAX_ROWS_HEIGHT / sum(rows)), ROW_LEAST)


def _stages_of_ranks(timelines: Sequence[tuple[str, Timeline]]) -> dict[int, list[StageId]]:
    stages: dict[int, set[StageId]] = {}
    for _, timeline in timelines:
        for rank in range(timeline.num_ranks):
            stages.setdefault(rank, set())
        for span in timeline.compute():
            stages[span.rank].add(span.stage)
    return {rank: sorted(ids) for rank, ids in stages.items()}


def _row_names(
    on_rank: Mapping[int, Sequence[StageId]], rank_names: Mapping[int, str] | None
) -> dict[int, str]:
    names = {}
    for rank, stages in on_rank.items():
        shown = [str(stage) for stage in stages]
        hidden = len(shown) - LABEL_STAGES
        if hidden > 0:
            shown = [*shown[:LABEL_STAGES], f"+{hidden}"]
        default = f"rank {rank}: {' '.join(shown)}" if shown else f"rank {rank}"
        names[rank] = (rank_names or {}).get(rank, default)
    return names


def _scale(timelines: Sequence[tuple[str, Timeline]], body: float) -> TimeScale:
    longest = max(timeline.makespan for _, timeline in timelines)
    unit, second = next((u for u in UNITS if longest >= u[1]), UNITS[-1 if longest else 1])
    end = longest / second or 1.0
    return TimeScale(unit, second, end, body / end)


def _body(timelines: Sequence[tuple[str, Timeline]]) -> float:
    """Return the width of the panels in inches, within limits, so that the median box is
    visible."""
    spans = (s for _, t in timelines for s in t.compute())
    lengths = sorted(s.end - s.start for s in spans if s.end > s.start)
    if not lengths:
        return MIN_WIDTH
    longest = max(timeline.makespan for _, timeline in timelines)
    return min(max(MIN_WIDTH, longest / lengths[len(lengths) // 2] * BOX), MAX_WIDTH)


def _captions(timelines: Sequence[tuple[str, Timeline]]) -> list[str]:
    (first_label, first), scale = timelines[0], _scale(timelines, 1.0)
    captions = []
    for index, (label, timeline) in enumerate(timelines):
        mean = timeline.mean_bubble
        caption = f"{label}: iteration {scale.text(timeline.makespan)}, mean bubble {mean:.0%}"
        if index and first.makespan:
            change = timeline.makespan / first.makespan - 1
            direction = "shorter" if change < 0 else "longer"
            caption += f", {abs(change):.1%} {direction} than {first_label}"
        captions.append(caption)
    return captions


def _looks(timelines: Sequence[tuple[str, Timeline]]) -> dict[str, Mapping[Op, Look]]:
    hues = module_hues(s.stage.module for _, t in timelines for s in t.compute())
    return {module: op_looks(hue) for module, hue in hues.items()}


def _legend(
    timelines: Sequence[tuple[str, Timeline]], looks: Mapping[str, Mapping[Op, Look]], stepped: bool
) -> list[list[Patch]]:
    """Return the legend entries by column, of equal lengths, with a column per module."""
    spans = [span for _, timeline in timelines for span in timeline.spans]
    used = {(span.stage.module, span.op) for span in spans if span.op in COMPUTE}
    blank = Patch(alpha=0.0, label="")
    columns: list[list[Patch]] = []
    for module, look_of in looks.items():
        columns.append([
            Patch(facecolor=look.fill, edgecolor=look.edge, linewidth=0.8, hatch=look.hatch,
                  label=f"{module} {look.name}")
            for op, look in look_of.items() if (module, op) in used
        ])
    extra = []
    if any(span.op == Op.RECV for span in spans):
        extra.append(Patch(facecolor=WAIT, label="waiting for a message"))
    if any(span.op in OPTIMIZER_OPS for span in spans):
        extra.append(Patch(facecolor=COLLECTIVE, label="reduce, clip, optimizer step"))
    if stepped:
        extra.append(Patch(alpha=0.0, label="lower boxes: later stages of a module on its rank"))
    if extra:
        columns.append(extra)
    height = max((len(column) for column in columns), default=0)
    return [[*column, *[blank] * (height - len(column))] for column in columns]


def _in_width(columns: list[list[Patch]], width: float) -> tuple[list[Patch], int]:
    """Return the entries column by column, and the number of columns that fit into the width in
    inches. Other columns follow below."""
    if not columns:
        return [], 1
    ruler = new_figure(1, 1)
    widest = max(text_width(ruler, str(h.get_label()), LEGEND_SIZE) for c in columns for h in c)
    count = min(len(columns), max(1, int(width / (widest + LEGEND_BESIDE))))
    blank = [Patch(alpha=0.0, label="")] * len(columns[0])
    columns = [*columns, *[blank] * (-len(columns) % count)]
    handles = [h for first in range(count) for column in columns[first::count] for h in column]
    return handles, count


def _draw_legend(figure: Figure, handles: list[Patch], columns: int, left: float) -> None:
    figure.legend(
        handles=handles, ncols=columns, loc="lower left", fontsize=LEGEND_SIZE, frameon=False,
        bbox_to_anchor=(left, 0.02), borderaxespad=0.0, handlelength=1.8, labelspacing=0.45,
        columnspacing=1.6,
    )


def _panel(
    axes: Axes, timeline: Timeline, names: Mapping[int, str], scale: TimeScale, label_size: float
) -> None:
    """Draw axes, row labels and bubbles; everything but the boxes."""
    count = max(timeline.num_ranks, 1)
    axes.set_xlim(0.0, scale.end)
    axes.set_ylim(count - 0.5, -0.5)  # rank 0 on top
    axes.set_yticks(range(timeline.num_ranks), [names[r] for r in range(timeline.num_ranks)])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 2.5, 5, 10]))
    axes.tick_params(axis="y", length=0, labelsize=label_size, labelcolor=TEXT)
    axes.tick_params(axis="x", labelsize=8, labelcolor=TEXT, color=FAINT)
    axes.grid(axis="x", color="#ECECEC", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#BBBBBB")
    transform = axes.get_yaxis_transform()  # x in panel widths, y in rows
    right = 1 + 0.62 / (scale.end * scale.inches)
    for rank in range(timeline.num_ranks):
        axes.axhline(rank, color="#F3F3F3", linewidth=0.7, zorder=0)
        axes.text(right, rank, f"{timeline.bubble(rank):.0%}", transform=transform,
                  fontsize=min(8.0, label_size), color=TEXT, va="center", ha="right")
    axes.text(right, _above(axes), "bubble", transform=axes.transAxes, fontsize=8, color=FAINT,
              ha="right", va="bottom")


def _above(axes: Axes) -> float:
    """Return a position slightly above the panel, in panel heights."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    return 1 + 0.07 / (axes.get_position().height * figure.get_size_inches()[1])


def _mark_end(axes: Axes, first: tuple[str, Timeline], scale: TimeScale, caption: float) -> None:
    """Draw a dashed line at the end of the first timeline, with its name if the caption leaves
    room."""
    label, timeline = first
    end = timeline.makespan / scale.second
    axes.axvline(end, color=TEXT, linewidth=0.9, linestyle=(0, (4, 3)), zorder=5, clip_on=False)
    figure = axes.figure
    assert isinstance(figure, Figure)
    text = f"end of {label}"
    if end * scale.inches - text_width(figure, text, 8) - 0.15 > caption:
        axes.text(end, _above(axes), text, transform=axes.get_xaxis_transform(),
                  fontsize=8, color=FAINT, ha="right", va="bottom")
