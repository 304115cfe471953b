"""Picture of a plan: stages, their ranks and edges, and trained layers."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle

from raymm.draw.palette import FAINT, RGB, TEXT, module_hues, tint
from raymm.draw.plan_sheet import (
    COST_LINE,
    HEAD,
    LEGEND,
    MARGIN,
    NOTE_LINE,
    PlanSheet,
    Point,
    heading,
    lay_out,
    layers_text,
    needs_backward,
    place_text,
    recomputes,
    small_print,
)
from raymm.draw.save import new_figure, picture_path, save_figure
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.schedule.stage_costs import StageCost, stage_costs

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
    cut and labelled with their other end. Raise a ``ValueError`` for another file suffix.

    Args:
        path: file to write, ``.png`` or ``.svg``.
        title: heading; by default ranks, microbatches and schedule.
    """
    target = picture_path(path)
    needs = needs_backward(plan)
    costs = stage_costs(plan) if plan.profile is not None else {}
    note = COST_NOTE if costs else ()
    sheet = lay_out(plan, needs, costs, note)
    figure = new_figure(sheet.width, sheet.height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, sheet.width)
    axes.set_ylim(0, sheet.height)
    axes.axis("off")
    axes.text(MARGIN, sheet.height - 0.3, title or heading(plan), fontsize=12, weight="bold",
              color=TEXT, va="center")
    hues = module_hues(node.name for node in plan.graph.nodes)
    _edges(axes, plan, sheet, needs)
    for stage in plan.stages:
        _box(axes, plan, stage, sheet, hues[stage.module], needs, costs.get(stage.id))
    for line, text in enumerate(note):
        axes.text(MARGIN, 0.16 + (len(note) - 1 - line) * NOTE_LINE, text, fontsize=7,
                  color=FAINT, va="center")
    _legend(axes, plan, needs, x=(MARGIN - 0.05) / sheet.width,
            y=(LEGEND / 2 + len(note) * NOTE_LINE) / sheet.height)
    return save_figure(figure, target)


def _box(
    axes: Axes, plan: Plan, stage: Stage, sheet: PlanSheet, hue: RGB, needs: set[StageId],
    cost: StageCost | None,
) -> None:
    (x, y), (width, height) = sheet.place[stage.id], sheet.box
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08",
                       facecolor="white", edgecolor=hue, linewidth=1.6, zorder=3)
    )
    top = y + height
    shared = stage.rank in (plan.shared_ranks or ())
    axes.text(x + 0.1, top - 0.19, str(stage.id), fontsize=10, weight="bold", color=TEXT,
              va="center", zorder=4)
    axes.text(x + width - 0.1, top - 0.19, place_text(stage), fontsize=8,
              color="white" if shared else TEXT, va="center", ha="right", zorder=4,
              bbox=_badge(SHARED if shared else "#EEEEEE"))
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


def _legend(axes: Axes, plan: Plan, needs: set[StageId], x: float, y: float) -> None:
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
    if plan.shared_ranks:
        handles.append(Patch(facecolor=SHARED, edgecolor="none", label="rank of several stages"))
    axes.legend(handles=handles, ncols=len(handles), loc="center left", fontsize=8,
                frameon=False, bbox_to_anchor=(x, y), borderaxespad=0, handlelength=1.4,
                columnspacing=1.4)
