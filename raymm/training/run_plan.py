"""The plan that an attempt of a run has: the one that was given, its checkpoint's, or a new one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.placement.placement import PlacementOptions
from raymm.actors.rank.rank_resources import RankResources, check_capacity
from raymm.errors import ClusterError
from raymm.model.multimodal import MultimodalModule
from raymm.model.whole_model import WholeModel
from raymm.planning.request import PlanRequest
from raymm.scheduler.plan.plan import Plan
from raymm.storage.checkpoint import Checkpoint
from raymm.training.execution import Execution


@dataclass(frozen=True)
class RunPlanner:
    """Plans a run for the cluster it finds.

    Attributes:
        request: what is asked for.
        model: the description.
        data: the run's.
        precision: the run's.
        optimizer: the run's.
        say: prints a line.
    """

    request: PlanRequest
    model: MultimodalModule | WholeModel
    data: Any
    precision: str
    optimizer: OptimizerConfig
    say: Callable[[str], None]

    def plan(
        self, checkpoint: Checkpoint | None, device: str, resources: RankResources,
        placement: PlacementOptions,
    ) -> Plan:
        """Plan; a run that goes on keeps the plan of its checkpoint while it can, so that its
        numbers are those of a run without interruption.

        Args:
            checkpoint: that it goes on from.
            device: of the ranks.
            resources: of each rank.
            placement: what is reserved beside them.
        """
        if checkpoint is not None:
            execution = Execution(Plan.from_dict(dict(checkpoint.manifest.plan)))
            reason = self._cannot_keep(execution, resources, placement)
            if reason is None:
                self.say("resuming with the plan of the checkpoint")
                return execution.plan
            self.say(f"planning again: {reason}")
        extra = placement.bundles_beside(resources.bundle())
        worker_cpus = sum(bundle.get("CPU", 0.0) for bundle in extra)
        from raymm.planning.planned_run import plan_for_cluster  # solvers, which few runs need

        planned = plan_for_cluster(
            self.request, self.model, self.data, device=device, resources=resources,
            worker_cpus=worker_cpus, dtype=self.precision,
            optimizer=self.optimizer, say=self.say,
        )
        for line in planned.lines:
            self.say(line)
        return planned.plan

    def _cannot_keep(
        self, execution: Execution, resources: RankResources, placement: PlacementOptions
    ) -> str | None:
        if (reason := execution.unkept(self.model, self.data)) is not None:
            return reason
        try:
            check_capacity(execution.num_processes, resources, placement)
        except ClusterError as error:
            return str(error)
        return None
