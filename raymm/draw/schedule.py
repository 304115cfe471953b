"""The picture of a step: what every rank did when; several timelines share one time axis."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
    Look,
    ink_on,
    module_hues,
    op_looks,
)
from raymm.draw.save import new_figure, picture_path, save_figure, text_width
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import COMPUTE, OPTIMIZER_OPS, Op
from raymm.scheduler.program.timeline import Span, Timeline

# Sizes in inches, font sizes in points.
ROW = 0.30
ROW_MANY = 0.24  # per row when a panel has more than MANY_ROWS
MANY_ROWS = 10
ROW_LEAST, MAX_ROWS_HEIGHT = 0.10, 32.0  # rows shrink to keep all of them this high
TITLE = 0.42  # above each panel
AXIS = 0.52  # below the last panel: tick labels and axis label
HEAD = 0.40  # the picture's title
LEGEND_ROW = 0.22
BUBBLES = 0.85  # right of the panels
MIN_WIDTH, MAX_WIDTH = 8.0, 20.0  # of the panels, without the margins
BOX = 0.17  # how wide the median compute box should at least be
LABEL_SIZE, CAPTION_SIZE = 8.5, 10.0
NUMBER_SIZES = (7.5, 6.5, 5.5, 4.8)  # the largest that fits its box is taken
DIGIT = 0.64 / 72  # inches of a digit per point of font size
LABEL_STAGES = 3  # more stages on a rank than this are counted, not named

# In rows: a box, and how much lower each later stage of the same module on the rank stands.
BOX_ROWS, STEP_ROWS, MAX_STEP_ROWS = 0.86, 0.20, 0.40
UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


class _Scale(NamedTuple):
    """The time axis all panels share. ``end`` is in units, a unit is ``second`` seconds."""

    unit: str
    second: float
    end: float
    inches: float  # per unit

    def text(self, seconds: float) -> str:
        return f"{seconds / self.second:,.4g} {self.unit}"


class _Step(NamedTuple):
    """Where a stage's boxes lie in their row: centre above the row's, and half height."""

    rise: float
    half: float


def draw_timelines(
    timelines: Sequence[tuple[str, Timeline]],
    path: str | os.PathLike[str],
    *,
    rank_names: Mapping[int, str] | None = None,
    title: str | None = None,
    bubble: float | None = None,
) -> Path:
    """Draw timelines of one step on one time axis, a panel each, a row per rank.

    Boxes have their module's hue, the darker the later in a microbatch's life: forward,
    recompute (striped), backward of inputs, backward of weights; forwards under ``no_grad``
    are pale with an outline. Where a rank has several stages of one module (chunks of an
    interleaved schedule, or replicas), boxes of later stages stand lower. Boxes of modules that
    run side by side stand one below the other, each as high as its quota. Thin grey lines
    are waits for a message. At the right of each row stands the rank's bubble, in the panel's
    title the iteration time and, from the second panel on, what it gains against the first,
    whose end is a dashed line. Every timeline is moved to begin at 0, so that a late start
    does not look like a slow step.

    Args:
        timelines: (label, timeline) pairs, e.g. ``[("predicted", p), ("measured", m)]`` or
            ``[("1f1b", a), ("zero_bubble", b)]``.
        path: file to write, ``.png`` or ``.svg``.
        rank_names: row labels; by default each rank with the stages it ran.
        bubble: the mean to write above, where rows are not ranks; by default that of the rows.
        title: heading of the picture.

    Returns:
        The path written.

    Raises:
        ValueError: without a timeline, or on another file suffix.
    """
    target = picture_path(path)
    if not timelines:
        raise ValueError("timelines is empty; at least one (label, timeline) pair is needed")
    on_rank = _stages_of_ranks(timelines)
    names = _row_names(on_rank, rank_names)
    steps = _steps(on_rank)
    hues = module_hues(s.stage.module for _, t in timelines for s in t.compute())
    looks = {module: op_looks(hue) for module, hue in hues.items()}
    handles, columns = _legend(timelines, looks, stepped=any(s.rise for s in steps.values()))

    rows = [max(timeline.num_ranks, 1) for _, timeline in timelines]
    row = ROW if max(rows) <= MANY_ROWS else ROW_MANY
    row = max(min(row, MAX_ROWS_HEIGHT / sum(rows)), ROW_LEAST)
    label_size = min(LABEL_SIZE, row * 72 * 0.8)
    ruler = new_figure(1, 1)
    left = 0.25 + max([text_width(ruler, name, label_size) for name in names.values()] or [0.0])
    captions = [
        _caption(
            label, timeline, timelines[0] if index else None, _scale(timelines, 1.0), bubble
        )
        for index, (label, timeline) in enumerate(timelines)
    ]
    body = max(_body(timelines), *(text_width(ruler, c, CAPTION_SIZE) + 0.2 for c in captions))
    scale = _scale(timelines, body)
    digits = _number_size(timelines, scale)
    legend = LEGEND_ROW * -(-len(handles) // columns) + 0.12 if handles else 0.0
    head = HEAD if title else 0.08
    width = left + body + BUBBLES
    height = head + sum(TITLE + row * n for n in rows) + AXIS + legend
    figure = new_figure(width, height)
    if title:
        figure.text(0.12 / width, 1 - 0.28 / height, title, fontsize=12, weight="bold",
                    color=TEXT, va="center")
    top = height - head
    for index, ((_, timeline), count) in enumerate(zip(timelines, rows, strict=True)):
        bottom = top - TITLE - row * count
        axes = figure.add_axes(
            (left / width, bottom / height, body / width, row * count / height)
        )
        _panel(axes, timeline, names, scale, label_size)
        _boxes(axes, timeline, looks, {**steps, **_on_quotas(timeline)}, scale, digits)
        axes.set_title(captions[index], loc="left", fontsize=CAPTION_SIZE, color=TEXT, pad=5)
        if index:
            _mark_end(axes, timelines[0], scale, text_width(ruler, captions[index], CAPTION_SIZE))
        if index < len(timelines) - 1:
            axes.tick_params(labelbottom=False, bottom=False)
        else:
            axes.set_xlabel(f"time ({scale.unit})", fontsize=9, color=TEXT)
        top = bottom
    if handles:
        figure.legend(
            handles=handles, ncols=columns, loc="lower left", fontsize=8, frameon=False,
            bbox_to_anchor=(left / width, 0.02), borderaxespad=0.0, handlelength=1.8,
            labelspacing=0.45, columnspacing=1.6,
        )
    return save_figure(figure, target)


def _stages_of_ranks(timelines: Sequence[tuple[str, Timeline]]) -> dict[int, list[StageId]]:
    stages: dict[int, set[StageId]] = {}
    for _, timeline in timelines:
        for rank in range(timeline.num_ranks):
            stages.setdefault(rank, set())
        for span in timeline.compute():
            stages[span.rank].add(span.stage)
    return {rank: sorted(found) for rank, found in stages.items()}


def _row_names(
    on_rank: Mapping[int, Sequence[StageId]], given: Mapping[int, str] | None
) -> dict[int, str]:
    names = {}
    for rank, stages in on_rank.items():
        shown = [str(stage) for stage in stages]
        more = len(shown) - LABEL_STAGES
        if more > 0:
            shown = [*shown[:LABEL_STAGES], f"+{more}"]
        default = f"rank {rank}: {' '.join(shown)}" if shown else f"rank {rank}"
        names[rank] = (given or {}).get(rank, default)
    return names


def _steps(on_rank: Mapping[int, Sequence[StageId]]) -> dict[tuple[int, StageId, float], _Step]:
    """By rank, stage and quota (here 1). Stages of one module on one rank stand one step lower
    each."""
    steps = {}
    for rank, stages in on_rank.items():
        for module in {stage.module for stage in stages}:
            same = [stage for stage in stages if stage.module == module]
            room = min(STEP_ROWS * (len(same) - 1), MAX_STEP_ROWS)
            for index, stage in enumerate(same):
                rise = room * (0.5 - index / (len(same) - 1)) if room else 0.0
                steps[rank, stage, 1.0] = _Step(rise, (BOX_ROWS - room) / 2)
    return steps


def _on_quotas(timeline: Timeline) -> dict[tuple[int, StageId, float], _Step]:
    """Where the boxes of what runs on a quota stand; in order of first appearance."""
    shares: dict[int, dict[str, float]] = {}
    for span in timeline.compute():
        if span.quota < 1:
            shares.setdefault(span.rank, {})[span.stage.module] = span.quota
    steps = {}
    for span in timeline.compute():
        if span.quota < 1:
            above = 0.0
            for module, quota in shares[span.rank].items():
                if module == span.stage.module:
                    break
                above += quota
            rise = BOX_ROWS * (0.5 - above - span.quota / 2)
            steps[span.rank, span.stage, span.quota] = _Step(rise, BOX_ROWS * span.quota / 2)
    return steps


def _scale(timelines: Sequence[tuple[str, Timeline]], body: float) -> _Scale:
    longest = max(timeline.makespan for _, timeline in timelines)
    unit, second = next((u for u in UNITS if longest >= u[1]), UNITS[-1 if longest else 1])
    end = longest / second or 1.0
    return _Scale(unit, second, end, body / end)


def _body(timelines: Sequence[tuple[str, Timeline]]) -> float:
    """Inches of the panels: enough for the median box to be seen, within limits."""
    spans = (s for _, t in timelines for s in t.compute())
    lengths = sorted(s.end - s.start for s in spans if s.end > s.start)
    if not lengths:
        return MIN_WIDTH
    longest = max(timeline.makespan for _, timeline in timelines)
    return min(max(MIN_WIDTH, longest / lengths[len(lengths) // 2] * BOX), MAX_WIDTH)


def _caption(
    label: str, timeline: Timeline, first: tuple[str, Timeline] | None, scale: _Scale,
    bubble: float | None,
) -> str:
    mean = timeline.mean_bubble if bubble is None else bubble
    caption = f"{label}: iteration {scale.text(timeline.makespan)}, mean bubble {mean:.0%}"
    if first is not None and first[1].makespan:
        change = timeline.makespan / first[1].makespan - 1
        caption += f", {abs(change):.1%} {'shorter' if change < 0 else 'longer'} than {first[0]}"
    return caption


def _legend(
    timelines: Sequence[tuple[str, Timeline]],
    looks: Mapping[str, Mapping[Op, Look]],
    stepped: bool,
) -> tuple[list[Patch], int]:
    """Legend entries, column by column (a column is a module), and the number of columns."""
    spans = [span for _, timeline in timelines for span in timeline.spans]
    used = {(span.stage.module, span.op) for span in spans if span.op in COMPUTE}
    blank = Patch(alpha=0.0, label="")
    columns: list[list[Patch]] = []
    for module, of_op in looks.items():
        columns.append([
            Patch(facecolor=look.fill, edgecolor=look.edge, linewidth=0.8, hatch=look.hatch,
                  label=f"{module} {look.name}")
            for op, look in of_op.items() if (module, op) in used
        ])
    other = []
    if any(span.op == Op.RECV for span in spans):
        other.append(Patch(facecolor=WAIT, label="waiting for a message"))
    if any(span.op in OPTIMIZER_OPS for span in spans):
        other.append(Patch(facecolor=COLLECTIVE, label="reduce, clip, optimizer step"))
    if stepped:
        other.append(Patch(alpha=0.0, label="lower boxes: later stages of a module on its rank"))
    if other:
        columns.append(other)
    height = max((len(column) for column in columns), default=0)
    handles = [h for column in columns for h in [*column, *[blank] * (height - len(column))]]
    return handles, max(len(columns), 1)


def _panel(
    axes: Axes, timeline: Timeline, names: Mapping[int, str], scale: _Scale, label_size: float
) -> None:
    """Axes, row labels and bubbles; everything but the boxes."""
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
    place = axes.get_yaxis_transform()  # x in widths of the panel, y in rows
    right = 1 + 0.62 / (scale.end * scale.inches)
    for rank in range(timeline.num_ranks):
        axes.axhline(rank, color="#F3F3F3", linewidth=0.7, zorder=0)
        axes.text(right, rank, f"{timeline.bubble(rank):.0%}", transform=place,
                  fontsize=min(8.0, label_size), color=TEXT, va="center", ha="right")
    axes.text(right, _above(axes), "bubble", transform=axes.transAxes, fontsize=8, color=FAINT,
              ha="right", va="bottom")


def _above(axes: Axes) -> float:
    """A little above the panel, in heights of it."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    return 1 + 0.07 / (axes.get_position().height * figure.get_size_inches()[1])


def _mark_end(
    axes: Axes, first: tuple[str, Timeline], scale: _Scale, caption: float
) -> None:
    """A dashed line where the first timeline ends, named if the caption leaves room."""
    label, timeline = first
    end = timeline.makespan / scale.second
    axes.axvline(end, color=TEXT, linewidth=0.9, linestyle=(0, (4, 3)), zorder=5, clip_on=False)
    figure = axes.figure
    assert isinstance(figure, Figure)
    text = f"end of {label}"
    if end * scale.inches - text_width(figure, text, 8) - 0.15 > caption:
        axes.text(end, _above(axes), text, transform=axes.get_xaxis_transform(),
                  fontsize=8, color=FAINT, ha="right", va="bottom")


def _boxes(
    axes: Axes,
    timeline: Timeline,
    looks: Mapping[str, Mapping[Op, Look]],
    steps: Mapping[tuple[int, StageId, float], _Step],
    scale: _Scale,
    digits: float,
) -> None:
    origin = min((span.start for span in timeline.spans), default=0.0)
    outline: RGB | str
    # Polygons, fills and edges per hatch, as a collection has one. Waits lie below everything,
    # outlined boxes above their neighbours' white borders.
    sheets: dict[str, tuple[list, list, list]] = {}
    numbers: list[tuple[float, float, float, Span, Look]] = []
    layers = {Op.RECV: 0, Op.FORWARD_NO_GRAD: 2}
    for span in sorted(timeline.spans, key=lambda s: layers.get(Op(s.op), 1)):
        start, stop = ((at - origin) / scale.second for at in (span.start, span.end))
        middle, hatch = float(span.rank), ""
        if span.op in COMPUTE:
            step = steps[span.rank, span.stage, span.quota]
            look = looks[span.stage.module][Op(span.op)]
            middle, half = span.rank - step.rise, step.half
            fill, outline, hatch = look.fill, look.edge, look.hatch
            numbers.append((start, stop, middle, span, look))
        elif span.op == Op.RECV:
            half, fill, outline = 0.06, WAIT, "none"
        elif span.op in OPTIMIZER_OPS:
            half, fill, outline = 0.30, COLLECTIVE, "white"
        else:  # a SEND only starts a transfer
            continue
        low, high = middle - half, middle + half
        polygons, fills, outlines = sheets.setdefault(hatch, ([], [], []))
        polygons.append([(start, low), (stop, low), (stop, high), (start, high)])
        fills.append(fill)
        outlines.append(outline)
    thin = min([0.6, *((stop - start) * scale.inches * 10 for start, stop, *_ in numbers)])
    for hatch, (polygons, fills, outlines) in sheets.items():
        axes.add_collection(
            PolyCollection(polygons, facecolors=fills, edgecolors=outlines,
                           linewidths=max(thin, 0.15), hatch=hatch or None)
        )
    _numbers(axes, numbers, scale, digits)


def _numbers(
    axes: Axes,
    boxes: Sequence[tuple[float, float, float, Span, Look]],
    scale: _Scale,
    largest: float,
) -> None:
    """Microbatch numbers, where they fit."""
    plain, fills = [], []
    row = _row_inches(axes)
    for start, stop, middle, span, look in boxes:
        # Where the common size has no room, a smaller one may.
        size = next((n for n in NUMBER_SIZES if n <= largest and _fits(span, n, scale)), 0.0)
        if not size:
            continue
        x = (start + stop) / 2
        axes.add_artist(
            Text(x, middle, str(span.microbatch), fontsize=size, color=ink_on(look.fill),
                 ha="center", va="center_baseline", clip_on=True)
        )
        if look.hatch:  # a plain patch keeps the digits off the stripes
            wide = (len(str(span.microbatch)) * DIGIT * size + 0.02) / 2 / scale.inches
            high = size / 72 * 0.5 / row
            plain.append([(x - wide, middle - high), (x + wide, middle - high),
                          (x + wide, middle + high), (x - wide, middle + high)])
            fills.append(look.fill)
    if plain:
        axes.add_collection(PolyCollection(plain, facecolors=fills, linewidths=0, gid="digits"))


def _row_inches(axes: Axes) -> float:
    figure = axes.figure
    assert isinstance(figure, Figure)
    rows = abs(axes.get_ylim()[1] - axes.get_ylim()[0])
    return axes.get_position().height * figure.get_size_inches()[1] / rows


def _fits(span: Span, size: float, scale: _Scale) -> bool:
    inches = (span.end - span.start) / scale.second * scale.inches
    return inches >= len(str(span.microbatch)) * DIGIT * size + 0.02


def _number_size(timelines: Sequence[tuple[str, Timeline]], scale: _Scale) -> float:
    """The largest font size of microbatch numbers at which most boxes have room."""
    spans = [span for _, timeline in timelines for span in timeline.compute()]
    for size in NUMBER_SIZES:
        if sum(_fits(span, size, scale) for span in spans) >= 0.85 * len(spans):
            return size
    return NUMBER_SIZES[-1]
