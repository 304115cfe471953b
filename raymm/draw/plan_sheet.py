"""Positions and texts of the boxes in the picture of a plan.

The loss is at the right. Plans that are too deep for the page continue in bands, and replicas of a
module are below each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raymm.draw.save import new_figure, text_width
from raymm.plural import plural
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.schedule.stage_costs import StageCost
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


class PlanSheet(NamedTuple):
    """Positions in inches from the page's lower left corner."""

    width: float
    height: float
    box: tuple[float, float]  # width and height of all boxes
    bottom: float  # of the lowest box
    place: dict[StageId, Point]  # lower left corner of each stage's box
    band: dict[StageId, int]  # band of each stage, from the top


def heading(plan: Plan) -> str:
    """Return the default heading of a plan, such as ``"4 ranks, 8 microbatches, 1f1b"``."""
    devices = f"{plan.num_processes} devices, " if plan.num_processes > plan.num_ranks else ""
    return (
        f"{plural(plan.num_ranks, 'rank')}, {devices}"
        f"{plural(plan.num_microbatches, 'microbatch', 'es')}, {plan.schedule}"
    )


def lay_out(
    plan: Plan, needs: set[StageId], costs: Mapping[StageId, StageCost], note: Sequence[str]
) -> PlanSheet:
    """Find a position for every stage. ``needs`` are the stages with a backward, ``costs`` those of
    one microbatch, and ``note`` lines below the legend."""
    ruler = new_figure(1, 1)
    lines = {text for stage in plan.stages
             for text in small_print(plan, stage, needs, costs.get(stage.id))}
    tops = {(str(s.id), place_text(s)) for s in plan.stages}
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
                text_width(ruler, heading(plan), 12) * 1.15 + 2 * MARGIN)
    return PlanSheet(width, height, (wide, high), bottom, corner, band)


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


def place_text(stage: Stage) -> str:
    """Return the rank of a stage, with the degrees of its processes: ``"rank 3 = tp 4 × cp 2"``."""
    degrees = rank_text(stage.degrees).replace(", ", " × ")
    return f"rank {stage.rank}" + (f" = {degrees}" if degrees else "")


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
