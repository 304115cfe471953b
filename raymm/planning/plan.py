"""A pipelined plan with the alternatives that were tried, its tables and pictures."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from raymm.costs.named_devices import CPU
from raymm.draw import draw_timelines
from raymm.draw.notebook import figures_html
from raymm.draw.row_table import (
    html_table,
    numbers_text,
    ranges_text,
    row_table,
    time_text,
)
from raymm.layout.plan_check import chosen_per_batch
from raymm.planning.inputs import Costs
from raymm.planning.passes import run_passes
from raymm.planning.request import PlanRequest
from raymm.plural import plural
from raymm.scheduler.costs.recomputation import KEEP
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.program.program import Program
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.memory import GIB, rank_memory
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedule.stage_costs import stage_costs
from raymm.scheduler.schedules.registry import DEFAULT_SCHEDULE
from raymm.scheduler.search.evaluation import (
    Option,
    Proposal,
    evaluate,
    places_text,
    step_bound,
    step_timeline,
)
from raymm.scheduler.search.module_degrees import rank_text
from raymm.scheduler.search.options import PlanProblem

# Number of slower plans, and of plans that do not fit, that are listed.
SHOWN, REFUSED_SHOWN = 8, 4
# Idle share of a step above which a rank gets a note.
MOSTLY_IDLE = 0.5
_LEFT = ("module", "stage", "layers", "shared", "GPU")


@dataclass(frozen=True)
class Planned:
    """A pipelined plan with the alternatives that were tried. Notebooks show the table.

    Attributes:
        proposal: all evaluated options; only the plan itself if the plan was given.
        problem: the solved problem; None if the plan was given.
        whole: modules that cannot be cut.
        unfit: reason why the plan does not fit in memory; None if it fits.
    """

    plan: Plan
    proposal: Proposal
    costs: Costs
    problem: PlanProblem | None = None
    whole: tuple[str, ...] = ()
    unfit: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def network(self) -> Network:
        return self.costs.network

    @cached_property
    def program(self) -> Program:
        """Program of a step in which every microbatch has every modality."""
        return full_program(self.plan)

    @cached_property
    def timeline(self) -> Timeline:
        """Simulated timeline of that step."""
        return step_timeline(self.plan, self.network, self.program)

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.makespan

    @classmethod
    def evaluated(cls, plan: Plan, costs: Costs, memory_limit: int | None = None) -> Planned:
        """Evaluate a given plan, whose own profile and memory limit (bytes per rank) take
        precedence."""
        costs = replace(costs, profile=plan.profile or costs.profile)
        plan = replace(
            plan, profile=costs.profile,
            memory_limit=memory_limit if plan.memory_limit is None else plan.memory_limit,
        )
        option, unfit = evaluate(plan, costs.network, "given")
        bound = step_bound(option.plan, costs.network)
        return cls(
            option.plan, Proposal((option,), (), bound, 0, 1), costs, unfit=unfit, notes=costs.notes
        )

    def finished(self, request: PlanRequest) -> Planned:
        """Return the plan after the passes of a request, and with its schedules per batch."""
        planned = self.after_passes(request.passes)
        if not request.per_batch:
            return planned
        plan = chosen_per_batch(planned.plan, request.schedules)
        note = f"order and schedule of each step by its sizes ({', '.join(plan.step_schedules)})"
        return replace(planned, plan=plan, notes=(*planned.notes, note))

    def after_passes(self, passes: Sequence[Any]) -> Planned:
        """Return the plan after its passes, evaluated again; see
        :func:`raymm.planning.passes.run_passes`."""
        if not passes:
            return self
        plan = run_passes(self.plan, passes)
        notes = (*self.notes, f"planning.passes: {', '.join(plan.passes)}")
        return replace(Planned.evaluated(plan, self.costs), notes=notes)

    def rows(self) -> list[dict[str, str]]:
        """Return one row per stage; replicas of a stage with the same values share a row, such as
        ``"0 x4"``.

        ``F``, ``B_d`` and ``B_w`` are milliseconds of one microbatch; with recomputation, one more
        ``F`` runs before ``B_d``. Weights (with gradients and optimizer state) and activations are
        in GiB; activations are the peak of the whole rank. The bubble is the share of the step in
        which the rank is idle. If a rank has several processes, all values are those of one
        process, and the column ``shared`` shows how the processes split the module. The column
        ``quota`` is the stage's share of its device; times are those of a full device.
        """
        plan, timeline = self.plan, self.timeline
        has_degrees = plan.num_processes > plan.num_ranks
        costs = stage_costs(plan)
        memory = rank_memory(plan, self.program)
        on_quotas = any(stage.quota is not None for stage in plan.stages)
        shown_ranks: set[int] = set()
        groups: dict[tuple[Any, ...], tuple[dict[str, str], list[Stage]]] = {}
        for stage in plan.stages:
            cost = costs[stage.id]
            first = stage.rank not in shown_ranks
            shown_ranks.add(stage.rank)
            trained = any(plan.graph.node(stage.module).trainable[slice(*stage.layers)])
            row = {
                "module": stage.module,
                "stage": "" if trained else " *",
                "layers": layers_text(plan, stage),
                **({"shared": rank_text(stage.degrees) or "-"} if has_degrees else {}),
                "rank": "",
                **({"quota": f"{stage.quota:g}" if stage.quota else "-"} if on_quotas else {}),
                "GPU": "",
                "F": _ms(cost.forward),
                "B_d": _ms(cost.backward_input) if cost.backward_input else "-",
                "B_w": _ms(cost.backward_weight) if cost.backward_weight else "-",
                "weights": _gib(cost.state_bytes),
                "activ.": _gib(memory[stage.rank].activations) if first else '"',
                "bubble": f"{timeline.bubble(stage.rank):.0%}" if first else '"',
            }
            groups.setdefault((stage.index, *row.values()), (row, []))[1].append(stage)
        for row, stages in groups.values():
            copies = f"{stages[0].index} x{len(stages)}"
            alone = str(stages[0].id).removeprefix(f"{stages[0].module}.")
            row["stage"] = (copies if len(stages) > 1 else alone) + row["stage"]
            ranks = [range(stage.rank, stage.rank + 1) for stage in stages]
            row["rank"] = ranges_text(ranks, numbers_text)
            processes = [plan.rank_processes(stage.rank) for stage in stages]
            row["GPU"] = ranges_text(
                processes, lambda part: _places(part, self.network.ranks_per_node)
            )
        return [row for row, _ in groups.values()]

    def table(self) -> Table:
        """Return a table of all stages for a rich console: layers, ranks, times and memory."""
        plan = self.plan
        rows = self.rows()
        marks = ["* frozen"] if any(row["stage"].endswith("*") for row in rows) else []
        marks += ["p projector"] if any(node.projector for node in plan.graph.nodes) else []
        marks += ["r recomputed"] if any(" r" in row["layers"] for row in rows) else []
        return row_table(
            rows,
            title=f"{plural(len(plan.stages), 'stage')} on {places_text(plan)}, "
            f"{plural(plan.num_microbatches, 'microbatch', 'es')}, {plan.schedule}",
            caption="F, B_d, B_w in ms, memory in GiB" + (
                ", of each device" if plan.num_processes > plan.num_ranks else ""
            ) + "".join(f"; {mark}" for mark in marks),
            left=_LEFT,
            sections=[i for i in range(1, len(rows)) if rows[i]["module"] != rows[i - 1]["module"]],
        )

    def summary(self) -> list[str]:
        """Return three lines: the plan, the predicted time of a step, and how far behind the next
        plan is."""
        plan, best = self.plan, self.proposal.best
        counts = ", ".join(_module_text(plan, node.name) for node in plan.graph.nodes)
        lines = [f"plan: {counts}; {places_text(plan)}, {plan.schedule}", self._prediction()]
        next_best = self.proposal.options[1:]
        if next_best:
            lines.append(
                f"best of {len(next_best) + 1} plans that were simulated to the end; the next is "
                f"{_slower(next_best[0], best)}: {next_best[0].label}"
            )
        elif self.problem is not None:
            lines.append("the only plan for so few ranks")
        return lines

    def explain(self) -> str:
        """Return a text on the predicted time of a step and on the alternatives."""
        proposal = self.proposal
        lines = [self._prediction()]
        if self.unfit:
            lines.append(f"does not fit: {self.unfit}")
        if self.problem is not None:
            if proposal.combinations:
                lines.append(
                    f"searched {proposal.combinations:,} combinations of stages per module within "
                    f"{plural(self.problem.ranks, 'rank')}: {proposal.simulated:,} simulated, the "
                    "others "
                    "excluded because they cannot be faster"
                )
            lines.append(f"{'chosen':>14} {proposal.best.label}")
            next_best = _others(proposal.options)
            for option in next_best[:SHOWN]:
                lines.append(f"{_slower(option, proposal.best):>14} {option.label}")
            if len(next_best) > SHOWN:
                lines.append(f"and {plural(len(next_best) - SHOWN, 'slower plan')}")
            for label, reason in proposal.refused[:REFUSED_SHOWN]:
                lines.append(f"does not fit {label}: {reason}")
            if len(proposal.refused) > REFUSED_SHOWN:
                lines.append(f"and {len(proposal.refused) - REFUSED_SHOWN} more that do not fit")
        for rank in range(self.plan.num_ranks):
            if (idle := self.timeline.bubble(rank)) > MOSTLY_IDLE:
                stages = ", ".join(str(stage.id) for stage in self.plan.rank_stages(rank))
                lines.append(f"note: rank {rank} ({stages}) is idle for {idle:.0%} of the step")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def draw(self, path: str | Path) -> Path:
        """Draw the simulated step into a ``.png`` or ``.svg`` file, and return its path.

        For a schedule other than 1F1B, the same stages under 1F1B are drawn above it.
        """
        plan = self.plan
        timelines = [(f"{plan.schedule}, predicted", self.timeline)]
        if plan.schedule != DEFAULT_SCHEDULE:
            plain = self.evaluated(
                replace(
                    plan, schedule=DEFAULT_SCHEDULE, policy=None, activation_limits=None
                ), self.costs
            )
            timelines.insert(0, (f"{DEFAULT_SCHEDULE}, the same stages", plain.timeline))
        return draw_timelines(
            timelines, path, rank_names=rank_names(plan),
            title=f"a step on {places_text(plan)}, "
            f"{plural(plan.num_microbatches, 'microbatch', 'es')}",
        )

    def _repr_html_(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            picture = self.draw(Path(folder) / "step.png")
            return html_table(self.rows(), self.explain()) + figures_html(
                {"the predicted step": picture}
            )

    def _utilization(self, seconds: float) -> float | None:
        """Return the model FLOPs utilization of a step; None on CPUs and unknown devices."""
        flops, device = self.costs.flops, self.costs.device
        if flops is None or device is None or device.name == CPU:
            return None
        peak = device.peak(self.costs.profile.dtype)
        return flops * self.plan.num_microbatches / (seconds * self.plan.num_processes * peak)

    def _prediction(self) -> str:
        seconds, bound = self.seconds, self.proposal.bound
        text = f"{time_text(seconds)} per step"
        if seconds > 0:
            tokens = self.costs.profile.tokens.get(self.plan.graph.backbone)
            if tokens:
                rate = tokens * self.plan.num_microbatches / seconds
                devices = self.plan.num_processes
                text += f", {rate:,.0f} tokens/s ({rate / devices:,.0f} per GPU)"
                if (utilization := self._utilization(seconds)) is not None:
                    text += f", MFU {utilization:.1%}"
                if (price := self.costs.dollars_per_gpu_hour) is not None:
                    dollars = devices * price / 3600 / rate * 1e6
                    text += f", {dollars:.3g} dollars per million tokens"
            above = max(seconds / bound - 1, 0.0) if bound else 0.0
            text += f"; no schedule of these stages takes less than {time_text(bound)} "
            text += f"(this plan takes {above:.1%} more)"
        profile = self.costs.profile
        return f"predicted {text}; {profile.source} costs of {profile.device}, {profile.dtype}"


def _places(processes: range, per_node: int) -> str:
    """Return node and local rank of the first and last process: ``"0:3"``, ``"1:0-7"``,
    ``"0:6-1:1"``."""
    node, first = divmod(processes[0], per_node)
    last_node, last = divmod(processes[-1], per_node)
    if len(processes) == 1:
        return f"{node}:{first}"
    return f"{node}:{first}-" + (f"{last}" if node == last_node else f"{last_node}:{last}")


def layers_text(plan: Plan, stage: Stage) -> str:
    """Return a stage's layers, such as ``"0-11"``, or ``"12-23 +p"`` with the projector. A trailing
    ``r`` stands for recomputation of all blocks, ``r4/12`` for recomputation in 4 of 12 blocks."""
    node = plan.graph.node(stage.module)
    lo, hi = stage.layers
    blocks = min(hi, node.num_blocks)
    text = f"{lo}-{blocks - 1}" if blocks - lo > 1 else f"{lo}"
    if hi > node.num_blocks:
        text = f"{text} +p" if blocks > lo else "p"
    count = sum(option != KEEP for option in stage.layer_options)
    return text + (" r" if stage.recompute else f" r{count}/{blocks - lo}" if count else "")


def _others(options: Sequence[Option]) -> list[Option]:
    """Return the options after the first, without those that differ only in the schedule's name."""
    seen_keys = set()
    result = []
    for option in options:
        key = option.plan.stages, round(option.seconds, 12)
        if key not in seen_keys:
            result.append(option)
        seen_keys.add(key)
    return result[1:]


def rank_names(plan: Plan) -> dict[int, str]:
    """Return a label for each rank: its number, its stages and how its processes split them."""
    names = {}
    for rank in range(plan.num_ranks):
        stages = [str(stage.id) for stage in plan.rank_stages(rank)]
        shown = " ".join(stages) if len(stages) <= 3 else f"{stages[0]} .. {stages[-1]}"
        degrees = rank_text(plan.degrees(rank))
        names[rank] = f"rank {rank}: {shown}" + (f" ({degrees})" if degrees else "")
    return names


def _module_text(plan: Plan, name: str) -> str:
    replicas = plan.replicas(name)
    degrees = rank_text(replicas[0][0].degrees)
    stages = len(replicas[0])
    copies = f" x{len(replicas)}" if len(replicas) > 1 else ""
    shared = f" ({degrees})" if degrees else ""
    return f"{name} {plural(stages, 'stage')}{shared}{copies}"


def _slower(option: Option, best: Option) -> str:
    text = f"{option.seconds / best.seconds - 1:.1%}"
    return "as fast" if text == "0.0%" else f"{text} slower"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
