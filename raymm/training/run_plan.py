"""Choice of the plan for an attempt without a given plan, the checkpoint's or a new one, and its
description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.placement.placement import PlacementOptions
from raymm.actors.rank.rank_resources import RankResources, check_capacity
from raymm.data import DataConfig
from raymm.errors import ClusterError
from raymm.layout.plan_check import chosen_per_batch, differences
from raymm.model.model import Model
from raymm.planning.passes import pass_names
from raymm.planning.request import PlanRequest
from raymm.plural import plural
from raymm.scheduler.plan.plan import Plan
from raymm.storage.checkpoint import Checkpoint


@dataclass(frozen=True)
class RunPlanner:
    """Planner of a run for the connected cluster."""

    request: PlanRequest
    model: Model
    data: Any
    precision: str
    optimizer: OptimizerConfig
    say: Callable[[str], None]

    def plan(
        self, checkpoint: Checkpoint | None, device: str, resources: RankResources,
        placement: PlacementOptions,
    ) -> Plan:
        """Return a plan. A resumed run keeps the plan of its checkpoint if possible, so that its
        results equal those of an uninterrupted run."""
        if checkpoint is not None:
            plan = Plan.from_dict(dict(checkpoint.manifest.plan))
            reason = self._cannot_keep(plan, resources, placement)
            if reason is None:
                self.say("resuming with the plan of the checkpoint")
                return self._per_batch(plan)
            self.say(f"planning again: {reason}")
        extra = placement.bundles_beside(resources.bundle())
        worker_cpus = sum(bundle.get("CPU", 0.0) for bundle in extra)
        # Imports solvers; few runs need them.
        from raymm.planning.planned_run import plan_for_cluster, request_for_cluster

        request, note = request_for_cluster(self.request, device, resources, worker_cpus)
        planned = plan_for_cluster(
            request, self.model, self.data, dtype=self.precision, optimizer=self.optimizer,
            note=note, say=self.say,
        )
        for line in planned.lines:
            self.say(line)
        return planned.plan

    def _per_batch(self, plan: Plan) -> Plan:
        """Return the plan of a checkpoint with the ``per_batch`` of the request."""
        if self.request.per_batch == bool(plan.step_schedules):
            return plan
        self.say(
            f"changed: planning.per_batch is {self.request.per_batch} from the next step on; sums "
            "are in another order"
        )
        if self.request.per_batch:
            return chosen_per_batch(plan, self.request.schedules)
        return replace(plan, step_schedules=())

    def _cannot_keep(
        self, plan: Plan, resources: RankResources, placement: PlacementOptions
    ) -> str | None:
        """Return why a resumed run cannot keep the plan of its checkpoint, or None."""
        different = differences(plan.graph, self.model.graph)
        if different:
            return f"the checkpoint's plan is for a different model: {'; '.join(different)}"
        microbatches = self.data.microbatches if isinstance(self.data, DataConfig) else None
        if microbatches is not None and plan.num_microbatches != microbatches:
            return (
                f"the checkpoint's plan has {plural(plan.num_microbatches, 'microbatch', 'es')}, "
                f"but data.microbatches is {microbatches}"
            )
        if (names := pass_names(self.request.passes)) != plan.passes:
            return (
                f"planning.passes is {list(names)}, and was {list(plan.passes)} for the "
                "checkpoint's plan"
            )
        try:
            check_capacity(plan.num_processes, resources, placement)
        except ClusterError as error:
            return str(error)
        return None


def plan_lines(plan: Plan, device: str) -> list[str]:
    """Return lines that describe a plan. The trainer continues the first line."""
    count = plan.num_microbatches
    extra = f"{plan.num_processes} processes, " if plan.num_processes > plan.num_ranks else ""
    slots = len({stage.slot for stage in plan.stages})
    stages = plural(len(plan.stages), "stage")
    stages += f" in {plural(slots, 'slot')}" if plan.uses_slots else ""
    lines = [
        f"{stages} on {plural(plan.num_ranks, 'rank')} ({extra}{device}), "
        f"{plural(count, 'microbatch', 'es')} per step"
    ]
    if count > 1 and plan.uses_slots:
        lines.append(
            f"note: data.microbatches is {count}, so the mapping runs {plural(count, 'time')} per "
            "step; set data.microbatches: 1 and run `raymm plan` to plan for all samples at once"
        )
    return lines
