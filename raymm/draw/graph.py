"""The picture of a plan: modules cut into stages, where each runs, what is trained."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle

from raymm.draw.palette import FAINT, RGB, TEXT, module_hues, tint
from raymm.draw.save import new_figure, picture_path, save_figure, text_width
from raymm.scheduler.plan import Plan, Stage

Point = tuple[float, float]

# Inches; font sizes in points.
BOX_WIDTH, BOX_HEIGHT = 1.62, 1.06
GAP_X, GAP_Y = 0.55, 0.62
MARGIN, HEAD, LEGEND = 0.3, 0.45, 0.42
CELL_HEIGHT, CELL_MAX = 0.15, 0.2
PORT = 0.3  # between the edges at one side of a box
PAD = 0.08  # how near an arrow may come to a box that is not its own
BENDS = (0.0, 0.15, -0.15, 0.3, -0.3, 0.45, -0.45, 0.6, -0.6, 0.8, -0.8)
ACTIVATION, GRADIENT = "#555555", "#B3261E"
TRAINED, FROZEN = 0.15, 0.82  # tints of a layer's cell


def draw_plan(plan: Plan, path: str | os.PathLike[str], *, title: str | None = None) -> Path:
    """Draw a plan's stages and the data flow between them.

    A box is a stage: its layers, its rank, and what its backward computes. The strip in
    it has a cell per layer, dark if the layer is trained, pale if it is frozen; a
    projector's cell is outlined. Grey arrows are activations; a red arrow beside one is
    the gradient that travels back along it (when the microbatch has every modality).
    Stages stand as far from the right as they are deep, so the loss is at the right.

    Args:
        plan: the plan.
        path: file to write, ``.png`` or ``.svg``.
        title: heading; by default ranks, microbatches and schedule.

    Returns:
        The path written.

    Raises:
        ValueError: on another file suffix.
    """
    target = picture_path(path)
    lanes = _lanes(plan)
    deepest = max(plan.depth.values())
    ruler = new_figure(1, 1)
    box = max([BOX_WIDTH, *(text_width(ruler, _layers(plan, s), 8) + 0.2 for s in plan.stages),
               *(text_width(ruler, s.name, 10) * 1.12 + text_width(ruler, f"rank {s.rank}", 8)
                 + 0.45 for s in plan.stages)])
    width = max(2 * MARGIN + deepest * (box + GAP_X) - GAP_X, 6.2)
    rows = max(lanes.values()) + 1
    height = HEAD + LEGEND + 2 * 0.15 + rows * (BOX_HEIGHT + GAP_Y) - GAP_Y
    figure = new_figure(width, height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    heading = title or (
        f"{_count(plan.num_ranks, 'rank', 's')}, "
        f"{_count(plan.num_microbatches, 'microbatch', 'es')}, {plan.schedule}"
    )
    axes.text(MARGIN, height - 0.3, heading, fontsize=12, weight="bold", color=TEXT, va="center")

    hues = module_hues(node.name for node in plan.graph.nodes)
    needs = _needs_backward(plan)
    place = {
        stage.name: (
            MARGIN + (deepest - plan.depth[stage.name]) * (box + GAP_X),
            height - HEAD - 0.15 - BOX_HEIGHT - lanes[stage.module] * (BOX_HEIGHT + GAP_Y),
        )
        for stage in plan.stages
    }
    leave, enter = _ports(plan, place)
    for src, dst in plan.stage_edges:
        (x0, y0), (x1, y1) = place[src], place[dst]
        start = (x0 + box, y0 + BOX_HEIGHT / 2 + leave[src, dst])
        stop = (x1, y1 + BOX_HEIGHT / 2 + enter[src, dst])
        others = [corner for name, corner in place.items() if name not in (src, dst)]
        bend = _bend(start, stop, others, box, height)
        _edge(axes, start, stop, bend, gradient=src in needs)
    for stage in plan.stages:
        _box(axes, plan, stage, place[stage.name], box, hues[stage.module], needs)
    _legend(axes, height=LEGEND / height)
    return save_figure(figure, target)


def _lanes(plan: Plan) -> dict[str, float]:
    """A row per module: one for each source, the mean of its producers for any other, and
    the nearest free row where two modules would lie on each other."""
    columns = {
        node.name: (
            min(plan.depth[s.name] for s in plan.module_stages(node.name)),
            max(plan.depth[s.name] for s in plan.module_stages(node.name)),
        )
        for node in plan.graph.nodes
    }
    lanes: dict[str, float] = {}
    sources = 0
    for name in plan.graph.topological:
        producers = plan.graph.producers(name)
        if producers:
            wanted = sum(lanes[p] for p in producers) / len(producers)
        else:
            wanted = float(sources)
            sources += 1
        near, far = columns[name]
        taken = [
            lanes[other] for other in lanes
            if columns[other][0] <= far and near <= columns[other][1]
        ]
        steps = [half * sign / 2 for half in range(2 * len(lanes) + 3) for sign in (1, -1)]
        lanes[name] = next(
            wanted + step for step in steps
            if wanted + step >= 0 and all(abs(wanted + step - lane) >= 1 for lane in taken)
        )
    return lanes


def _needs_backward(plan: Plan) -> set[str]:
    """Stages with something trainable in them or before them."""
    needs: set[str] = set()
    for stage in plan.topological_stages:
        before = [src for src, dst in plan.stage_edges if dst == stage.name]
        if plan.trainable(stage) or any(src in needs for src in before):
            needs.add(stage.name)
    return needs


def _work(plan: Plan, stage: Stage, needs: set[str]) -> str:
    if stage.name not in needs:
        return "frozen: forward only"
    if not plan.trainable(stage):
        return "frozen: passes gradients on"
    before = [src for src, dst in plan.stage_edges if dst == stage.name]
    return "trained" if not any(src in needs for src in before) else "trained, passes gradients on"


def _layers(plan: Plan, stage: Stage) -> str:
    lo, hi = stage.layers
    node = plan.graph.node(stage.module)
    blocks = min(hi, node.num_blocks)
    parts = []
    if blocks - lo == 1:
        parts.append(f"layer {lo}")
    elif blocks > lo:
        parts.append(f"layers {lo}–{blocks - 1}")
    if hi > node.num_blocks:
        parts.append("projector")
    return " + ".join(parts)


def _box(
    axes: Axes, plan: Plan, stage: Stage, corner: tuple[float, float], width: float, hue: RGB,
    needs: set[str],
) -> None:
    x, y = corner
    axes.add_patch(
        FancyBboxPatch((x, y), width, BOX_HEIGHT, boxstyle="round,pad=0,rounding_size=0.08",
                       facecolor="white", edgecolor=hue, linewidth=1.6, zorder=3)
    )
    top = y + BOX_HEIGHT
    axes.text(x + 0.1, top - 0.19, stage.name, fontsize=10, weight="bold", color=TEXT,
              va="center", zorder=4)
    axes.text(x + width - 0.1, top - 0.19, f"rank {stage.rank}", fontsize=8, color=TEXT,
              va="center", ha="right", zorder=4,
              bbox={"boxstyle": "round,pad=0.25", "facecolor": "#EEEEEE", "edgecolor": "none"})
    axes.text(x + 0.1, top - 0.44, _layers(plan, stage), fontsize=8, color=TEXT, va="center",
              zorder=4)
    axes.text(x + 0.1, top - 0.63, _work(plan, stage, needs), fontsize=7, color=FAINT,
              va="center", zorder=4)
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


def _ports(
    plan: Plan, place: Mapping[str, Point]
) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]:
    """Where each edge leaves and enters its boxes: inches above the middle of their sides,
    in the order of the boxes at the other end, so that edges of one box do not cross."""
    leave: dict[tuple[str, str], float] = {}
    enter: dict[tuple[str, str], float] = {}
    for stage in plan.stages:
        for here, there, ports in ((0, 1, leave), (1, 0, enter)):
            edges = [e for e in plan.stage_edges if e[here] == stage.name]
            edges.sort(key=lambda e: place[e[there]][1])
            step = min(PORT, (BOX_HEIGHT - 0.3) / max(len(edges) - 1, 1))
            for index, edge in enumerate(edges):
                ports[edge] = (index - (len(edges) - 1) / 2) * step
    return leave, enter


def _bend(
    start: Point, stop: Point, corners: Sequence[Point], width: float, height: float
) -> float:
    """How far an arrow must bend (matplotlib's arc3 radius) to stay out of the other boxes
    and on the page; 0 if nothing helps."""
    (x0, y0), (x1, y1) = start, stop
    for rad in BENDS:
        xc, yc = (x0 + x1) / 2 + rad * (y1 - y0), (y0 + y1) / 2 - rad * (x1 - x0)
        clear = True
        for step in range(1, 40):
            t = step / 40
            x = (1 - t) ** 2 * x0 + 2 * t * (1 - t) * xc + t * t * x1
            y = (1 - t) ** 2 * y0 + 2 * t * (1 - t) * yc + t * t * y1
            inside = LEGEND < y < height - HEAD and not any(
                left - PAD < x < left + width + PAD and low - PAD < y < low + BOX_HEIGHT + PAD
                for left, low in corners
            )
            clear = clear and inside
        if clear:
            return rad
    return 0.0


def _edge(axes: Axes, start: Point, stop: Point, bend: float, gradient: bool) -> None:
    run, rise = stop[0] - start[0], stop[1] - start[1]
    # Activations and gradients lie beside each other, as far apart on a steep edge as on
    # a flat one.
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


def _count(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun if number == 1 else noun + plural}"


def _legend(axes: Axes, height: float) -> None:
    grey: RGB = (0.35, 0.35, 0.35)
    handles = [
        Patch(facecolor=tint(grey, TRAINED), edgecolor=grey, label="trained layer"),
        Patch(facecolor=tint(grey, FROZEN), edgecolor=grey, label="frozen layer"),
        Patch(facecolor="white", edgecolor=TEXT, linewidth=1.2, label="projector"),
        Line2D([], [], color=ACTIVATION, marker=">", markersize=5, label="activations"),
        Line2D([], [], color=GRADIENT, marker="<", markersize=5, label="gradients"),
    ]
    axes.legend(handles=handles, ncols=len(handles), loc="center left", fontsize=8,
                frameon=False, bbox_to_anchor=(0.01, height / 2), handlelength=1.6)
