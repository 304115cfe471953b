"""Elastic runs, whose number of replicas follows the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import ray
from ray.autoscaler.sdk import request_resources

from raymm.actors.placement.node_types import Resources, has_autoscaler
from raymm.actors.placement.placement import (
    RELEASE_S,
    PlacementOptions,
    call_behind,
    count_places,
    free_resources,
    wait_for_release,
)
from raymm.actors.rank.rank_resources import RankResources
from raymm.model.model import Model
from raymm.runtime.specs import MultimodalParallelSpec
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.plan.plan import Plan

# Seconds to wait for the resources of a plan with more than the fewest replicas. Other jobs may
# have taken the resources since they were counted.
ROOM_S = 30.0


class ElasticPlans:
    """Candidate plans of an elastic run. The free resources of the cluster decide which plan runs.

    Attributes:
        plans: sorted by number of processes; among equal numbers, by replicas of the language
            model.

    Raises:
        PlanError: a candidate plan is invalid.
    """

    def __init__(self, spec: MultimodalParallelSpec, model: Model) -> None:
        sizes = sorted(spec.sizes(), key=lambda size: size.language_model_spec.dp)
        plans = [size.plan(model) for size in sizes]
        self.plans = sorted(plans, key=lambda plan: plan.num_processes)
        self._held: Mapping[str, Resources] = {}
        self._most: int | None = None
        self._asked = False

    def largest(self, room: int) -> Plan:
        """Return the largest plan of at most ``room`` processes; the smallest plan if none fits."""
        fitting = [plan for plan in self.plans if plan.num_processes <= room]
        return fitting[-1] if fitting else self.plans[0]

    def plan(
        self, resources: RankResources, placement: PlacementOptions
    ) -> tuple[Plan, PlacementOptions]:
        """Return the plan for the currently free resources, and its placement options.

        Only the smallest plan waits for nodes to join. Until the block of :meth:`asking` ends, an
        autoscaler is requested to provide the resources of the largest plan.
        """
        if has_autoscaler():
            self._asked = True
            ranks = [resources.bundle()] * self.plans[-1].num_processes
            request_resources(bundles=[*ranks, *map(dict, placement.bundles_beside(ranks[0]))])
        wait_for_release(self._held)
        self._held = {}
        room = self._room(resources, placement)
        plan = self.largest(room if self._most is None else min(room, self._most))
        if plan is self.plans[0]:
            return plan, placement
        return plan, replace(placement, wait_for_nodes_s=ROOM_S)

    def gives_way(self, plan: Plan | StageMapping | None) -> bool:
        """Return True if a smaller plan exists after the resources for ``plan`` were lost before
        its processes were placed. The next call of :meth:`plan` then returns a smaller plan."""
        if not isinstance(plan, Plan) or plan.num_processes <= self.plans[0].num_processes:
            return False
        self._most = plan.num_processes - 1
        return True

    def started(self, held: Mapping[str, Resources]) -> None:
        """Record the resources that the started processes hold, by node."""
        self._held, self._most = held, None

    def larger(
        self, plan: Plan, resources: RankResources, placement: PlacementOptions
    ) -> Plan | None:
        """Return a plan with more processes than the running one if resources for it are free, or
        None."""
        best = self.largest(self._room(resources, placement))
        return best if best.num_processes > plan.num_processes else None

    def _room(self, resources: RankResources, placement: PlacementOptions) -> int:
        free = free_resources(self._held)
        rank = resources.bundle()
        return count_places(free.values(), rank, placement.bundles_beside(rank))

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Context at whose end a request for resources to an autoscaler is withdrawn."""
        try:
            yield
        finally:
            if self._asked and ray.is_initialized():
                call_behind(partial(request_resources, bundles=[])).join(RELEASE_S)
            self._asked = False
