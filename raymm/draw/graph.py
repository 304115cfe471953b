"""Picture of a plan: stages, their ranks and edges, and trained layers."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle

from raymm.draw.palette import FAINT, RGB, TEXT, module_hues, tint
from raymm.draw.row_table import numbers_text, ranges_text
from raymm.draw.save import new_figure, picture_path, save_figure, text_width
from raymm.plural import plural
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.schedule.stage_costs import StageCost, stage_costs
from raymm.scheduler.search.module_degrees import rank_text

Point = tuple[float, float]

# Inches; font sizes in points.
BOX_WIDTH, BOX_HEIGHT = 1.62, 1.06
COST_LINE = 0.17  # a box with costs is higher by two of these
GAP_X, GAP_Y = 0.55, 0.5
FAN, MAX_FAN = 0.1, 0.3  # extra gap for steep arrows, per edge into one stage beyond two
BAND_GAP = 0.62  # between bands
MAX_WIDTH, MIN_WIDTH = 17.0, 7.2  # of a picture; the legend needs the minimum
MARGIN, HEAD, LEGEND, NOTE_LINE = 0.3, 0.6, 0.42, 0.16
MANY_STAGES = 10  # above, replicas share a box


class StageLabel(NamedTuple):
    """Texts at the top of a box.

    Attributes:
        name: the stage, with the number of its replicas if the box stands for all of them.
        place: ranks of the stage, with the degrees of their processes: ``"rank 3 = tp 4 × cp 2"``.
        shared: True if a rank has several stages.
    """

    name: str
    place: str
    shared: bool


class PlanSheet(NamedTuple):
    """Positions in inches from the page's lower left corner."""

    width: float
    height: float
    box: tuple[float, float]  # width and height of all boxes
    bottom: float  # of the lowest box
    place: dict[StageId, Point]  # lower left corner of each stage's box
    band: dict[StageId, int]  # band of each stage, from the top
    label: Mapping[StageId, StageLabel]


def heading(plan: Plan) -> str:
    """Return the default heading of a plan, such as ``"4 ranks, 8 microbatches, 1f1b"``."""
    devices = f"{plan.num_processes} devices, " if plan.num_processes > plan.num_ranks else ""
    return (
        f"{plural(plan.num_ranks, 'rank')}, {devices}"
        f"{plural(plan.num_microbatches, 'microbatch', 'es')}, {plan.schedule}"
    )


def lay_out(
    plan: Plan, labels: Mapping[StageId, StageLabel], needs: set[StageId],
    costs: Mapping[StageId, StageCost], note: Sequence[str], title: str,
) -> PlanSheet:
    """Find a position for every stage. ``needs`` are the stages with a backward, ``costs`` those of
    one microbatch, and ``note`` lines below the legend."""
    ruler = new_figure(1, 1)
    lines = {text for stage in plan.stages
             for text in small_print(plan, stage, needs, costs.get(stage.id))}
    tops = {(label.name, label.place) for label in labels.values()}
    middles = {(layers_text(plan, s), "recompute" if recomputes(s, needs) else "")
               for s in plan.stages}
    wide = max([
        BOX_WIDTH, *(text_width(ruler, text, 7) + 0.2 for text in lines),
        *(text_width(ruler, layers, 8) + (text_width(ruler, mark, 7) + 0.35 if mark else 0.2)
          for layers, mark in middles),
        *(text_width(ruler, name, 10) * 1.12 + text_width(ruler, corner, 8) + 0.45
          for name, corner in tops),
    ])
    high = BOX_HEIGHT + (2 * COST_LINE if costs else 0.0)
    deepest = max(plan.depth.values())
    edges_in = max(len(producers) for producers in plan.stage_producers.values())
    gap = GAP_X + min(FAN * max(edges_in - 2, 0), MAX_FAN)
    most = max(int((MAX_WIDTH - 2 * MARGIN + gap) / (wide + gap)), 2)
    bands = -(-deepest // most)
    columns = -(-deepest // bands)
    # Cut arrows need room next to the outer boxes.
    side = MARGIN + (GAP_X if bands > 1 else 0.0)
    rows = _rows(plan)
    column = {s.id: deepest - plan.depth[s.id] for s in plan.stages}
    band = {name: position // columns for name, position in column.items()}
    levels = [
        [rows[s.module, s.replica] for s in plan.stages if band[s.id] == b] for b in range(bands)
    ]
    tall = [(max(used) - min(used)) * (high + GAP_Y) + high for used in levels]
    bottom = LEGEND + len(note) * NOTE_LINE + 0.15
    height = HEAD + sum(tall) + BAND_GAP * (bands - 1) + bottom
    top = [height - HEAD - sum(tall[:b]) - BAND_GAP * b for b in range(bands)]
    corner = {
        s.id: (
            side + (column[s.id] % columns) * (wide + gap),
            top[band[s.id]] - high
            - (rows[s.module, s.replica] - min(levels[band[s.id]])) * (high + GAP_Y),
        )
        for s in plan.stages
    }
    texts = [text_width(ruler, text, 7) for text in note]
    width = max(2 * side + columns * (wide + gap) - gap, MIN_WIDTH,
                *(text + 2 * MARGIN for text in texts),
                text_width(ruler, title, 12) * 1.15 + 2 * MARGIN)
    return PlanSheet(width, height, (wide, high), bottom, corner, band, labels)


def _rows(plan: Plan) -> dict[tuple[str, int], float]:
    """Return a row per replica of a module: one for each source, the mean row of the producers for
    others, and the nearest free row if two would overlap."""
    rows: dict[tuple[str, int], float] = {}
    spans: dict[tuple[str, int], tuple[int, int]] = {}
    sources = 0
    for module in plan.graph.topological:
        producers = plan.graph.producers(module)
        for replica in plan.replicas(module):
            key = module, replica[0].replica
            producer_rows = [row for (name, _), row in rows.items() if name in producers]
            if producer_rows:
                ideal = sum(producer_rows) / len(producer_rows)
            else:
                ideal = float(sources)
                sources += 1
            depths = [plan.depth[stage.id] for stage in replica]
            near, far = min(depths), max(depths)
            used_rows = [
                rows[neighbor] for neighbor, (first, last) in spans.items()
                if first <= far and near <= last
            ]
            steps = (half * sign / 2 for half in range(4 * len(rows) + 3) for sign in (1, -1))
            rows[key] = next(
                ideal + step for step in steps
                if ideal + step >= 0 and all(abs(ideal + step - row) >= 1 for row in used_rows)
            )
            spans[key] = near, far
    return rows


def needs_backward(plan: Plan) -> set[StageId]:
    """Return the stages with a trainable layer in them or before them."""
    needs: set[StageId] = set()
    for stage in plan.topological_stages:
        producers = [src for src, dst in plan.stage_edges if dst == stage.id]
        if plan.trainable(stage) or any(src in needs for src in producers):
            needs.add(stage.id)
    return needs


def _work(plan: Plan, stage: Stage, needs: set[StageId]) -> str:
    if stage.id not in needs:
        return "frozen: forward only"
    if not plan.trainable(stage):
        return "frozen: passes gradients on"
    sources = [src for src, dst in plan.stage_edges if dst == stage.id]
    return "trained" if not any(src in needs for src in sources) else "trained, passes gradients on"


def _labels(plan: Plan, stages: Sequence[Sequence[Stage]]) -> dict[StageId, StageLabel]:
    """Return the label of the first of each sequence of stages, whose box stands for all."""
    labels = {}
    for first, *others in stages:
        ranks = [range(stage.rank, stage.rank + 1) for stage in (first, *others)]
        degrees = rank_text(first.degrees).replace(", ", " × ")
        labels[first.id] = StageLabel(
            f"{first.id}" + (f" x{len(ranks)}" if others else ""),
            f"rank {ranges_text(ranks, numbers_text)}" + (f" = {degrees}" if degrees else ""),
            any(stage.rank in (plan.shared_ranks or ()) for stage in (first, *others)),
        )
    return labels


def _first_replicas(plan: Plan) -> Plan:
    """Return a plan with the first replica of each module alone, on as few ranks."""
    stages = [stage for stage in plan.stages if not stage.replica]
    ranks = {rank: number for number, rank in enumerate(sorted({s.rank for s in stages}))}
    return Plan(
        plan.graph, tuple(replace(stage, rank=ranks[stage.rank]) for stage in stages),
        plan.num_microbatches, plan.schedule,
    )


def layers_text(plan: Plan, stage: Stage) -> str:
    """Return the layers of a stage by number, with the last one included, and its projector."""
    lo, hi = stage.layers
    node = plan.graph.node(stage.module)
    blocks = min(hi, node.num_blocks)
    phrases = []
    if blocks - lo == 1:
        phrases.append(f"layer {lo}")
    elif blocks > lo:
        phrases.append(f"layers {lo}–{blocks - 1}")
    if hi > node.num_blocks:
        phrases.append("projector")
    return " + ".join(phrases)


def recomputes(stage: Stage, needs: set[StageId]) -> bool:
    """Return True if a stage recomputes, which requires a backward."""
    return stage.recompute and stage.id in needs


def small_print(plan: Plan, stage: Stage, needs: set[StageId], cost: StageCost | None) -> list[str]:
    """Return the lines below a box's heading: the work of its backward and, unless ``cost`` is
    None, time and memory of one microbatch."""
    lines = [_work(plan, stage, needs)]
    if cost is None:
        return lines
    is_recomputed = recomputes(stage, needs)
    operations = [
        ("F", cost.forward), ("R", cost.forward if is_recomputed else 0.0),
        ("B_d", cost.backward_input), ("B_w", cost.backward_weight),
    ]
    lines.append(" + ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in operations
                            if seconds or name == "F") + " ms")
    kept_bytes = cost.input_bytes if is_recomputed else cost.activation_bytes
    lines.append(f"state {_size(cost.state_bytes)}, keeps {_size(kept_bytes)}")
    return lines


def _size(number: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= factor:
            return f"{number / factor:.{0 if number >= 100 * factor else 1}f} {unit}"
    return f"{number} B"


# Inches; font sizes in points.
CELL_HEIGHT, CELL_MAX = 0.15, 0.2
PORT = 0.3  # between the edges at one side of a box
PAD = 0.08  # distance of an arrow from other boxes
BENDS = (0.0, 0.15, -0.15, 0.3, -0.3, 0.45, -0.45, 0.6, -0.6, 0.8, -0.8)
STUB = 0.46  # length of an arrow that is cut between bands
ACTIVATION, GRADIENT, SHARED = "#555555", "#B3261E", "#111111"
TRAINED, FROZEN = 0.15, 0.82  # tints of a layer's cell
COST_NOTE = (
    "ms per microbatch: F forward, R recompute, B_d and B_w backward of inputs and weights",
    "state: weights, gradients, optimizer; keeps: activations of one microbatch",
)


def draw_plan(plan: Plan, path: str | os.PathLike[str], *, title: str | None = None) -> Path:
    """Draw a plan's stages and the data flow between them, and return the path.

    A box is a stage with its layers, its rank (dark if several stages share it), the parallel
    degrees of the rank, the work of its backward, and, if the plan has a profile, its cost per
    process and microbatch. The strip in it has a cell per layer, dark if the layer is trained and
    pale if it is frozen; the cell of a projector is outlined. Grey arrows are activations, and red
    arrows next to them gradients. The loss is at the right, and replicas of a module are below each
    other. A plan that is too deep for the page continues in a band below; arrows between bands are
    cut and labelled with their other end. If there are more than :data:`MANY_STAGES` stages, the
    first replica of a module stands for all. Raise a ``ValueError`` for another file suffix.

    Args:
        title: heading; by default ranks, microbatches and schedule.
    """
    target = picture_path(path)
    needs = needs_backward(plan)
    costs = stage_costs(plan) if plan.profile is not None else {}
    note = COST_NOTE if costs else ()
    title = title or heading(plan)
    if len(plan.stages) > MANY_STAGES:
        stages: dict[tuple[str, int], list[Stage]] = {}
        for stage in sorted(plan.stages, key=lambda stage: stage.replica):
            stages.setdefault((stage.module, stage.index), []).append(stage)
        labels = _labels(plan, list(stages.values()))
        plan = _first_replicas(plan)
    else:
        labels = _labels(plan, [[stage] for stage in plan.stages])
    sheet = lay_out(plan, labels, needs, costs, note, title)
    figure = new_figure(sheet.width, sheet.height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, sheet.width)
    axes.set_ylim(0, sheet.height)
    axes.axis("off")
    axes.text(MARGIN, sheet.height - 0.3, title, fontsize=12, weight="bold",
              color=TEXT, va="center")
    hues = module_hues(node.name for node in plan.graph.nodes)
    _edges(axes, plan, sheet, needs)
    for stage in plan.stages:
        _box(axes, plan, stage, sheet, hues[stage.module], needs, costs.get(stage.id))
    for line, text in enumerate(note):
        axes.text(MARGIN, 0.16 + (len(note) - 1 - line) * NOTE_LINE, text, fontsize=7,
                  color=FAINT, va="center")
    shared = any(label.shared for label in labels.values())
    _legend(axes, plan, needs, shared, x=(MARGIN - 0.05) / sheet.width,
            y=(LEGEND / 2 + len(note) * NOTE_LINE) / sheet.height)
    return save_figure(figure, target)


def _box(
    axes: Axes, plan: Plan, stage: Stage, sheet: PlanSheet, hue: RGB, needs: set[StageId],
    cost: StageCost | None,
) -> None:
    (x, y), (width, height), label = sheet.place[stage.id], sheet.box, sheet.label[stage.id]
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08",
                       facecolor="white", edgecolor=hue, linewidth=1.6, zorder=3)
    )
    top = y + height
    axes.text(x + 0.1, top - 0.19, label.name, fontsize=10, weight="bold", color=TEXT,
              va="center", zorder=4)
    axes.text(x + width - 0.1, top - 0.19, label.place, fontsize=8,
              color="white" if label.shared else TEXT, va="center", ha="right", zorder=4,
              bbox=_badge(SHARED if label.shared else "#EEEEEE"))
    axes.text(x + 0.1, top - 0.44, layers_text(plan, stage), fontsize=8, color=TEXT, va="center",
              zorder=4)
    if recomputes(stage, needs):
        axes.text(x + width - 0.1, top - 0.44, "recompute", fontsize=7, color=TEXT,
                  va="center", ha="right", zorder=4, bbox=_badge(tint(hue, 0.7)))
    for line, text in enumerate(small_print(plan, stage, needs, cost)):
        axes.text(x + 0.1, top - 0.63 - line * COST_LINE, text, fontsize=7,
                  color=TEXT if line else FAINT, va="center", zorder=4)
    lo, hi = stage.layers
    node = plan.graph.node(stage.module)
    cell = min((width - 0.2) / (hi - lo), CELL_MAX)
    for index in range(lo, hi):
        projector = index >= node.num_blocks
        axes.add_patch(
            Rectangle(
                (x + 0.1 + (index - lo) * cell, y + 0.12), cell * 0.9, CELL_HEIGHT,
                facecolor=tint(hue, TRAINED if node.trainable[index] else FROZEN),
                edgecolor=TEXT if projector else hue, linewidth=1.2 if projector else 0.5,
                zorder=5 if projector else 4,
            )
        )


def _badge(colour: RGB | str) -> dict[str, Any]:
    return {"boxstyle": "round,pad=0.25", "facecolor": colour, "edgecolor": "none"}


def _edges(axes: Axes, plan: Plan, sheet: PlanSheet, needs: set[StageId]) -> None:
    leave, enter = _ports(plan, sheet)
    wide, high = sheet.box
    for src, dst in plan.stage_edges:
        (x0, y0), (x1, y1) = sheet.place[src], sheet.place[dst]
        start = (x0 + wide, y0 + high / 2 + leave[src, dst])
        stop = (x1, y1 + high / 2 + enter[src, dst])
        gradient = src in needs
        if sheet.band[src] == sheet.band[dst]:
            _edge(axes, start, stop, _bend(start, stop, sheet, (src, dst)), gradient)
            continue
        for tail, head, name, side in (
            (start, (start[0] + STUB, start[1]), dst, "left"),
            ((stop[0] - STUB, stop[1]), stop, src, "right"),
        ):
            _edge(axes, tail, head, 0.0, gradient)
            axes.text(tail[0] + STUB / 2, tail[1] + 0.15, str(name), fontsize=7, color=ACTIVATION,
                      ha="center", va="center", zorder=6, gid=f"cut {side}",
                      bbox={"boxstyle": "square,pad=0.05", "facecolor": "white",
                            "edgecolor": "none"})


def _ports(plan: Plan, sheet: PlanSheet) -> tuple[dict[Edge, float], dict[Edge, float]]:
    """Return where each edge leaves and enters its boxes, in inches above the middle of their
    sides. The order is that of the boxes at the other end, so that edges of one box do not
    cross."""
    leave: dict[Edge, float] = {}
    enter: dict[Edge, float] = {}
    for stage in plan.stages:
        for end, far_end, ports in ((0, 1, leave), (1, 0, enter)):
            edges = [e for e in plan.stage_edges if e[end] == stage.id]
            edges.sort(key=lambda e: sheet.place[e[far_end]][1])
            step = min(PORT, (sheet.box[1] - 0.3) / max(len(edges) - 1, 1))
            for index, edge in enumerate(edges):
                ports[edge] = (index - (len(edges) - 1) / 2) * step
    return leave, enter


def _bend(start: Point, stop: Point, sheet: PlanSheet, ends: Edge) -> float:
    """Return the bend of an arrow (the radius of matplotlib's arc3) that avoids the other boxes and
    stays on the page; 0 if there is none."""
    width, height = sheet.box
    corners = [corner for name, corner in sheet.place.items() if name not in ends]
    (x0, y0), (x1, y1) = start, stop
    for rad in BENDS:
        xc, yc = (x0 + x1) / 2 + rad * (y1 - y0), (y0 + y1) / 2 - rad * (x1 - x0)
        clear = True
        for step in range(1, 40):
            t = step / 40
            x = (1 - t) ** 2 * x0 + 2 * t * (1 - t) * xc + t * t * x1
            y = (1 - t) ** 2 * y0 + 2 * t * (1 - t) * yc + t * t * y1
            is_free = sheet.bottom - 0.15 < y < sheet.height - HEAD + 0.15 and not any(
                left - PAD < x < left + width + PAD and low - PAD < y < low + height + PAD
                for left, low in corners
            )
            clear = clear and is_free
        if clear:
            return rad
    return 0.0


def _edge(axes: Axes, start: Point, stop: Point, bend: float, gradient: bool) -> None:
    run, rise = stop[0] - start[0], stop[1] - start[1]
    # The arrows of activations and gradients have the same distance on steep and flat edges.
    shift = min(0.06 * math.hypot(run, rise) / max(run, 0.1), 0.13) if gradient else 0.0

    def arrow(begin: Point, end: Point, colour: str, dy: float, rad: float) -> None:
        axes.add_patch(
            FancyArrowPatch(
                (begin[0], begin[1] + dy), (end[0], end[1] + dy), arrowstyle="-|>",
                mutation_scale=11, linewidth=1.3, color=colour, zorder=2,
                connectionstyle=f"arc3,rad={rad}", shrinkA=1.5, shrinkB=1.5,
            )
        )

    arrow(start, stop, ACTIVATION, shift, bend)
    if gradient:
        arrow(stop, start, GRADIENT, -shift, -bend)


def _legend(
    axes: Axes, plan: Plan, needs: set[StageId], shared: bool, x: float, y: float
) -> None:
    grey: RGB = (0.35, 0.35, 0.35)
    trained = {flag for node in plan.graph.nodes for flag in node.trainable}
    handles: list[Patch | Line2D] = []
    if True in trained:
        handles.append(Patch(facecolor=tint(grey, TRAINED), edgecolor=grey, label="trained layer"))
    if False in trained:
        handles.append(Patch(facecolor=tint(grey, FROZEN), edgecolor=grey, label="frozen layer"))
    if any(node.projector for node in plan.graph.nodes):
        handles.append(Patch(facecolor="white", edgecolor=TEXT, linewidth=1.2, label="projector"))
    if plan.stage_edges:
        handles.append(Line2D([], [], color=ACTIVATION, marker=">", markersize=5,
                              label="activations"))
    if any(src in needs for src, _ in plan.stage_edges):
        handles.append(Line2D([], [], color=GRADIENT, marker="<", markersize=5, label="gradients"))
    if shared:
        handles.append(Patch(facecolor=SHARED, edgecolor="none", label="rank of several stages"))
    axes.legend(handles=handles, ncols=len(handles), loc="center left", fontsize=8,
                frameon=False, bbox_to_anchor=(x, y), borderaxespad=0, handlelength=1.4,
                columnspacing=1.4)
