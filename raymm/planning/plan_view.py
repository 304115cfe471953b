"""What a person sees of a plan: a table, an explanation, the picture of its step."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from raymm.draw import draw_timelines
from raymm.draw.notebook import figures_html
from raymm.draw.row_table import html_table, row_table, time_text
from raymm.planning.plan_result import PlanResult
from raymm.scheduler.costs.recomputation import KEEP
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.schedule.memory import GIB, rank_memory
from raymm.scheduler.schedule.stage_costs import stage_costs
from raymm.scheduler.search.evaluation import Option, places_text
from raymm.scheduler.search.module_degrees import rank_text

# How many of the plans that lost, and of those that do not fit, are listed.
SHOWN, REFUSED_SHOWN = 8, 4
_LEFT = ("module", "stage", "layers", "shared", "GPU")


def plan_rows(planned: PlanResult) -> list[dict[str, str]]:
    """A row per stage. ``F``, ``B_d``, ``B_w`` are milliseconds of one microbatch (with
    recomputation, one more F comes before ``B_d``); weights (with gradients and optimizer
    state) and activations are in GiB, those of activations the whole rank's most; the bubble
    is the rank's share of the step without work. Of a rank of several processes, everything is
    what each of them has; the column ``shared``, which is there if there are such ranks, says
    how they share the module. The column ``quota``, where there are any, is the stage's share of
    its rank; times are those of a whole device."""
    plan, timeline = planned.plan, planned.timeline
    several = plan.num_processes > plan.num_ranks
    costs = stage_costs(plan)
    memory = rank_memory(plan, planned.program)
    on_quotas = any(stage.quota is not None for stage in plan.stages)
    rows, seen = [], set()
    for stage in plan.stages:
        cost = costs[stage.id]
        first = stage.rank not in seen
        seen.add(stage.rank)
        trained = any(plan.graph.node(stage.module).trainable[slice(*stage.layers)])
        split = cost.backward_input, cost.backward_weight
        rows.append({
            "module": stage.module,
            "stage": str(stage.id).removeprefix(f"{stage.module}.") + ("" if trained else " *"),
            "layers": layers_text(plan, stage),
            **({"shared": rank_text(stage.degrees) or "-"} if several else {}),
            "rank": str(stage.rank),
            **({"quota": f"{stage.quota:g}" if stage.quota else "-"} if on_quotas else {}),
            "GPU": _places(plan.rank_processes(stage.rank), planned.network.ranks_per_node),
            "F": _ms(cost.forward),
            "B_d": _ms(split[0]) if split[0] else "-",
            "B_w": _ms(split[1]) if split[1] else "-",
            "weights": _gib(cost.state_bytes),
            "activ.": _gib(memory[stage.rank].activations) if first else '"',
            "bubble": f"{timeline.bubble(stage.rank):.0%}" if first else '"',
        })
    return rows


def _places(processes: range, per_node: int) -> str:
    """Node and place in it of the first process, and of the last if there are several:
    ``"0:3"``, ``"1:0-7"``, ``"0:6-1:1"``."""
    node, place = divmod(processes[0], per_node)
    last_node, last = divmod(processes[-1], per_node)
    if len(processes) == 1:
        return f"{node}:{place}"
    return f"{node}:{place}-" + (f"{last}" if node == last_node else f"{last_node}:{last}")


def layers_text(plan: Plan, stage: Stage) -> str:
    """E.g. ``"0-11"``, or ``"12-23 +p"`` with the projector; `` r`` after it: recomputed, as a
    whole or, ``"r4/12"``, as many of its blocks, in parts or whole."""
    node = plan.graph.node(stage.module)
    lo, hi = stage.layers
    blocks = min(hi, node.num_blocks)
    text = f"{lo}-{blocks - 1}" if blocks - lo > 1 else f"{lo}"
    if hi > node.num_blocks:
        text = f"{text} +p" if blocks > lo else "p"
    again = sum(option != KEEP for option in stage.layer_options)
    return text + (" r" if stage.recompute else f" r{again}/{blocks - lo}" if again else "")


def plan_table(planned: PlanResult) -> Table:
    """:func:`plan_rows` as a rich table."""
    plan = planned.plan
    rows = plan_rows(planned)
    marks = ["* frozen"] if any(row["stage"].endswith("*") for row in rows) else []
    marks += ["p projector"] if any(node.projector for node in plan.graph.nodes) else []
    marks += ["r recomputed"] if any(" r" in row["layers"] for row in rows) else []
    return row_table(
        rows,
        title=f"{len(plan.stages)} stages on {places_text(plan)}, {plan.num_microbatches} "
        f"microbatches, {plan.schedule}",
        caption="F, B_d, B_w in ms, memory in GiB" + (
            ", of each device" if plan.num_processes > plan.num_ranks else ""
        ) + "".join(f"; {mark}" for mark in marks),
        left=_LEFT,
        sections=[i for i in range(1, len(rows)) if rows[i]["module"] != rows[i - 1]["module"]],
    )


def summary(planned: PlanResult) -> list[str]:
    """Three lines: what runs, how long a step takes, and why this and not something else."""
    plan, best = planned.plan, planned.proposal.best
    counts = ", ".join(_module_text(plan, node.name) for node in plan.graph.nodes)
    lines = [f"plan: {counts}; {places_text(plan)}, {plan.schedule}", _prediction(planned)]
    others = planned.proposal.options[1:]
    if others:
        lines.append(
            f"best of {len(others) + 1} plans that were simulated to the end; the next is "
            f"{_slower(others[0], best)} slower: {others[0].label}"
        )
    elif planned.problem is not None:
        lines.append("the only plan for so few ranks")
    return lines


def explanation(planned: PlanResult) -> str:
    """How long a step takes, what was tried instead, and why it lost."""
    proposal = planned.proposal
    lines = [_prediction(planned)]
    if planned.unfit:
        lines.append(f"does not fit: {planned.unfit}")
    if planned.problem is not None:
        if proposal.combinations:
            lines.append(
                f"searched {proposal.combinations:,} combinations of stages per module within "
                f"{planned.problem.ranks} ranks: {proposal.simulated:,} simulated, the others "
                "cannot be faster than those"
            )
        lines.append(f"chosen      {proposal.best.label}")
        others = _others(proposal.options)
        for option in others[:SHOWN]:
            lines.append(f"{_slower(option, proposal.best):>7} slower {option.label}")
        if len(others) > SHOWN:
            lines.append(f"and {len(others) - SHOWN} slower ones")
        for label, reason in proposal.refused[:REFUSED_SHOWN]:
            lines.append(f"does not fit {label}: {reason}")
        if len(proposal.refused) > REFUSED_SHOWN:
            lines.append(f"and {len(proposal.refused) - REFUSED_SHOWN} more that do not fit")
    lines += [f"note: {note}" for note in planned.notes]
    return "\n".join(lines)


def _others(options: Sequence[Option]) -> list[Option]:
    """The options after the first, without those that only have another name for the schedule
    of one before."""
    seen = set()
    result = []
    for option in options:
        key = option.plan.stages, round(option.seconds, 12)
        if key not in seen:
            result.append(option)
        seen.add(key)
    return result[1:]


def draw_schedule(planned: PlanResult, path: str | Path) -> Path:
    """Draw the simulated step; above it, for another schedule than 1F1B, the same stages
    under 1F1B."""
    plan = planned.plan
    timelines = [(f"{plan.schedule}, predicted", planned.timeline)]
    if plan.schedule != "1f1b":
        plain = PlanResult.evaluated(
            replace(plan, schedule="1f1b", policy=None, activation_limits=None), planned.costs
        )
        timelines.insert(0, ("1f1b, the same stages", plain.timeline))
    return draw_timelines(
        timelines, path, rank_names=rank_names(plan),
        title=f"a step on {places_text(plan)}, {plan.num_microbatches} microbatches",
    )


def rank_names(plan: Plan) -> dict[int, str]:
    """Per rank, its number, its stages, and how it is several processes."""
    names = {}
    for rank in range(plan.num_ranks):
        stages = [str(stage.id) for stage in plan.rank_stages(rank)]
        shown = " ".join(stages) if len(stages) <= 3 else f"{stages[0]} .. {stages[-1]}"
        several = rank_text(plan.degrees(rank))
        names[rank] = f"rank {rank}: {shown}" + (f" ({several})" if several else "")
    return names


def plan_html(planned: PlanResult) -> str:
    """Table, explanation and the simulated step, for notebooks."""
    with tempfile.TemporaryDirectory() as folder:
        picture = draw_schedule(planned, Path(folder) / "step.png")
        return html_table(plan_rows(planned), explanation(planned)) + figures_html(
            {"the predicted step": picture}
        )


def _prediction(planned: PlanResult) -> str:
    seconds, bound = planned.seconds, planned.proposal.bound
    text = f"{time_text(seconds)} per step"
    if seconds > 0:
        tokens = planned.costs.profile.tokens.get(planned.plan.graph.backbone)
        if tokens:
            rate = tokens * planned.plan.num_microbatches / seconds
            text += f", {rate:,.0f} tokens/s"
        above = max(seconds / bound - 1, 0.0) if bound else 0.0
        text += f"; at least {time_text(bound)} under any schedule (it is {above:.1%} above that)"
    profile = planned.costs.profile
    return f"predicted {text}; {profile.source} costs of {profile.device}, {profile.dtype}"


def _module_text(plan: Plan, name: str) -> str:
    replicas = plan.replicas(name)
    several = rank_text(replicas[0][0].degrees)
    stages = len(replicas[0])
    copies = f" x{len(replicas)}" if len(replicas) > 1 else ""
    shared = f" ({several})" if several else ""
    return f"{name} {stages} stage{'s' * (stages != 1)}{shared}{copies}"


def _slower(option: Option, best: Option) -> str:
    return f"{option.seconds / best.seconds - 1:.1%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
