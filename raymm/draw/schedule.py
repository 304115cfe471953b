"""Picture of a step: the work of every rank over time. Several timelines share one time axis."""

from __future__ import annotations

import math
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

# Heights in rows: a box, and the offset of each later stage of the same module on the rank.
BOX_ROWS, STEP_ROWS, MAX_STEP_ROWS = 0.86, 0.20, 0.40
NUMBER_SIZES = (7.5, 6.5, 5.5, 4.8)  # the largest size that fits the box is used
DIGIT = 0.64 / 72  # width of a digit in inches per point of font size


class TimeScale(NamedTuple):
    """The time axis of all panels. ``end`` is in units, and a unit has ``second`` seconds."""

    unit: str
    second: float
    end: float
    inches: float  # per unit

    def text(self, seconds: float) -> str:
        return f"{seconds / self.second:,.4g} {self.unit}"


class BoxPlace(NamedTuple):
    """Position of a stage's boxes in their row: the centre relative to the row's, and half the
    height."""

    rise: float
    half: float


# By rank, stage and quota.
BoxPlaces = Mapping[tuple[int, StageId, float], BoxPlace]


def places_by_order(on_rank: Mapping[int, Sequence[StageId]]) -> BoxPlaces:
    """Return positions of the boxes of stages on a full device (quota 1). Later stages of one
    module on one rank are each one step lower."""
    boxes = {}
    for rank, stages in on_rank.items():
        for module in {stage.module for stage in stages}:
            module_stages = [stage for stage in stages if stage.module == module]
            room = min(STEP_ROWS * (len(module_stages) - 1), MAX_STEP_ROWS)
            for index, stage in enumerate(module_stages):
                rise = room * (0.5 - index / (len(module_stages) - 1)) if room else 0.0
                boxes[rank, stage, 1.0] = BoxPlace(rise, (BOX_ROWS - room) / 2)
    return boxes


def places_on_quotas(timeline: Timeline) -> BoxPlaces:
    """Return positions of the boxes of stages on a quota: below those of concurrent modules with
    larger quotas, whatever their order of start, so that compared timelines look the same."""
    rank_spans: dict[int, list[Span]] = {}
    for span in timeline.compute():
        if span.quota < 1:
            rank_spans.setdefault(span.rank, []).append(span)
    boxes = {}
    for rank, spans in rank_spans.items():
        together = _concurrent_modules(spans)
        quotas = {span.stage.module: span.quota for span in spans}
        for span in spans:
            modules = sorted(together[span.stage.module], key=lambda m: (-quotas[m], m))
            above = sum(quotas[m] for m in modules[: modules.index(span.stage.module)])
            rise = BOX_ROWS * (0.5 - above - span.quota / 2)
            box = BoxPlace(rise, BOX_ROWS * span.quota / 2)
            boxes[rank, span.stage, span.quota] = box
    return boxes


def _concurrent_modules(spans: Sequence[Span]) -> dict[str, list[str]]:
    """Return by module those that ever run at the same time, directly or through others."""
    together: dict[str, list[str]] = {}
    end, running = 0.0, ""
    for span in sorted(spans, key=lambda s: s.start):
        concurrent = together.setdefault(span.stage.module, [span.stage.module])
        if span.start < end and running not in concurrent:
            merged = [*concurrent, *together[running]]
            together.update(dict.fromkeys(merged, merged))
        if span.end > end:
            end, running = span.end, span.stage.module
    return together


def number_size(timelines: Sequence[tuple[str, Timeline]], scale: TimeScale) -> float:
    """Return the largest font size of microbatch numbers that fits most boxes."""
    spans = [span for _, timeline in timelines for span in timeline.compute()]
    for size in NUMBER_SIZES:
        if sum(_fits(span, size, scale) for span in spans) >= 0.85 * len(spans):
            return size
    return NUMBER_SIZES[-1]


def draw_boxes(
    axes: Axes,
    timeline: Timeline,
    looks: Mapping[str, Mapping[Op, Look]],
    places: BoxPlaces,
    scale: TimeScale,
    digits: float,
) -> None:
    """Draw a timeline's spans into its panel: compute as boxes, waits and optimizer ops as bars.
    ``digits`` is the largest font size of microbatch numbers, in points."""
    origin = min((span.start for span in timeline.spans), default=0.0)
    outline: RGB | str
    # A collection has one hatch, so polygons, fills and edges are grouped by hatch. Waits are drawn
    # below everything, outlined boxes above the white borders of their neighbours.
    sheets: dict[str, tuple[list, list, list]] = {}
    numbers: list[tuple[float, float, float, Span, Look]] = []
    widths: list[tuple[float, float]] = []
    row = _row_inches(axes)
    layers = {Op.RECV: 0, Op.FORWARD_NO_GRAD: 2}
    for span in sorted(timeline.spans, key=lambda s: layers.get(Op(s.op), 1)):
        start, stop = ((time - origin) / scale.second for time in (span.start, span.end))
        middle, hatch = float(span.rank), ""
        if span.op in COMPUTE:
            box = places[span.rank, span.stage, span.quota]
            look = looks[span.stage.module][Op(span.op)]
            middle, half = span.rank - box.rise, box.half
            fill, outline, hatch = look.fill, look.edge, look.hatch
            widths.append((start, stop))
            if 2 * half * row >= NUMBER_SIZES[-1] / 72:
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
    thin = min([0.6, *((stop - start) * scale.inches * 10 for start, stop in widths)])
    for hatch, (polygons, fills, outlines) in sheets.items():
        axes.add_collection(
            PolyCollection(polygons, facecolors=fills, edgecolors=outlines,
                           linewidths=max(thin, 0.15), hatch=hatch or None)
        )
    _numbers(axes, numbers, scale, digits)


def _numbers(
    axes: Axes,
    boxes: Sequence[tuple[float, float, float, Span, Look]],
    scale: TimeScale,
    largest: float,
) -> None:
    plain, fills = [], []
    row = _row_inches(axes)
    for start, stop, middle, span, look in boxes:
        # A smaller size may fit where the common size does not.
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


def _fits(span: Span, size: float, scale: TimeScale) -> bool:
    inches = (span.end - span.start) / scale.second * scale.inches
    return inches >= len(str(span.microbatch)) * DIGIT * size + 0.02


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
    rank's bubble is at the right of each row. Of more than :data:`MANY_ROWS` ranks, those that do
    the same at the same times share a row, such as replicas. The panel's title has the iteration
    time and, from the second panel on, the gain against the first, whose end is a dashed line. All
    timelines start at 0, so that a late start does not look like a slow step. Raise a
    ``ValueError`` if there is no timeline, and for another file suffix.

    Args:
        timelines: (label, timeline) pairs, e.g. ``[("predicted", p), ("measured", m)]``.
        rank_names: row labels; by default each rank with its stages.
    """
    target = picture_path(path)
    if not timelines:
        raise ValueError("timelines is empty; at least one (label, timeline) pair is needed")
    on_rank = _stages_of_ranks(timelines)
    names = _row_names(on_rank, rank_names)
    captions = _captions(timelines)
    if len(names) > MANY_ROWS:
        timelines, names = _folded(timelines, names)
        on_rank = _stages_of_ranks(timelines)
    boxes, looks = places_by_order(on_rank), _looks(timelines)
    rows = [max(timeline.num_ranks, 1) for _, timeline in timelines]
    row = _row_height(rows)
    label_size = min(LABEL_SIZE, row * 72 * 0.8)

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


def _folded(
    timelines: Sequence[tuple[str, Timeline]], names: Mapping[int, str]
) -> tuple[list[tuple[str, Timeline]], dict[int, str]]:
    """Return timelines and names of rows with one rank of those that do the same at the same times
    in all timelines, apart from replicas and microbatches, and with their number in its name."""
    work: dict[int, list[object]] = {rank: [] for rank in names}
    for index, (_, timeline) in enumerate(timelines):
        digits = 6 - math.floor(math.log10(timeline.makespan)) if timeline.makespan else 0
        for span in sorted(timeline.spans, key=lambda span: (span.rank, span.start, span.end)):
            work[span.rank].append((
                index, span.op, span.stage.module, span.stage.index, span.quota,
                round(span.start, digits), round(span.end, digits),
            ))
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, spans in work.items():
        groups.setdefault(tuple(spans), []).append(rank)
    rows = {ranks[0]: row for row, ranks in enumerate(groups.values())}
    folded = [
        (label, Timeline(
            tuple(s._replace(rank=rows[s.rank]) for s in timeline.spans if s.rank in rows),
            len(rows),
        ))
        for label, timeline in timelines
    ]
    return folded, {
        rows[ranks[0]]: names[ranks[0]] + (f" (x{len(ranks)})" if len(ranks) > 1 else "")
        for ranks in groups.values()
    }


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
