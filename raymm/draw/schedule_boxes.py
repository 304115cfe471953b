"""Boxes of a timeline: position in the rank's row, appearance, and number of the microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from raymm.draw.palette import COLLECTIVE, RGB, WAIT, Look, ink_on
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
