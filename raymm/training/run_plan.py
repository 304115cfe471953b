"""Choice of the plan for an attempt without a given plan: the checkpoint's, or a new one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.placement.placement import PlacementOptions
from raymm.actors.rank.rank_resources import RankResources, check_capacity
from raymm.errors import ClusterError
from raymm.model.model import Model
from raymm.planning.passes import pass_names
from raymm.planning.request import PlanRequest
from raymm.scheduler.plan.plan import Plan
from raymm.storage.checkpoint import Checkpoint
from raymm.training.execution import Execution


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
            execution = Execution(Plan.from_dict(dict(checkpoint.manifest.plan)))
            reason = self._cannot_keep(execution, resources, placement)
            if reason is None:
                self.say("resuming with the plan of the checkpoint")
                return execution.plan
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

    def _cannot_keep(
        self, execution: Execution, resources: RankResources, placement: PlacementOptions
    ) -> str | None:
        if (reason := execution.unkept(self.model, self.data)) is not None:
            return reason
        if (names := pass_names(self.request.passes)) != execution.plan.passes:
            return (
                f"planning.passes is {list(names)}, and was {list(execution.plan.passes)} for the "
                "checkpoint's plan"
            )
        try:
            check_capacity(execution.num_processes, resources, placement)
        except ClusterError as error:
            return str(error)
        return None
