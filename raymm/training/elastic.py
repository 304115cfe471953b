"""Runs whose replicas come and go with the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import ray
from ray.autoscaler.sdk import request_resources

from raymm.actors.placement.node_types import Resources, has_autoscaler
from raymm.actors.placement.placement import RELEASE_S, PlacementOptions, call_behind
from raymm.actors.placement.room import count_places, free_resources, wait_for_release
from raymm.actors.rank.rank_resources import RankResources
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.plan.plan import Plan

# Seconds until the room that is there for more than the fewest replicas must have been reserved.
ROOM_S = 30.0


class ElasticPlans:
    """The plans among which the cluster's room decides.

    Args:
        spec: with ranges of replicas.
        model: the description.

    Attributes:
        plans: fewest processes first; of as many, fewest of the language model.

    Raises:
        PlanError: one of them cannot be.
    """

    def __init__(self, spec: MultimodalParallelSpec, model: MultimodalModule) -> None:
        sizes = sorted(spec.sizes(), key=lambda size: size.language_model_spec.dp)
        plans = [size.plan(model) for size in sizes]
        self.plans = sorted(plans, key=lambda plan: plan.num_processes)
        self._held: Mapping[str, Resources] = {}
        self._most: int | None = None
        self._asked = False

    def largest(self, room: int) -> Plan:
        """The plan for so many processes; the smallest one if there is none."""
        fitting = [plan for plan in self.plans if plan.num_processes <= room]
        return fitting[-1] if fitting else self.plans[0]

    def plan(
        self, resources: RankResources, placement: PlacementOptions
    ) -> tuple[Plan, PlacementOptions]:
        """The plan for what the cluster has room for now, and how it is placed: nodes are waited
        for by the smallest one only. An autoscaler is asked for the room of the largest one, until
        :meth:`asking` ends.

        Args:
            resources: of each process.
            placement: what is reserved beside them.
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
        """The room that there was for a plan is gone before its processes were placed; whether
        there is a smaller plan, which the next one is then.

        Args:
            plan: the one.
        """
        if not isinstance(plan, Plan) or plan.num_processes <= self.plans[0].num_processes:
            return False
        self._most = plan.num_processes - 1
        return True

    def started(self, held: Mapping[str, Resources]) -> None:
        """Processes have started, which reserve so much by node."""
        self._held, self._most = held, None

    def larger(
        self, plan: Plan, resources: RankResources, placement: PlacementOptions
    ) -> Plan | None:
        """A plan for more processes than those of the one that has started, if there is room.

        Args:
            plan: that has started.
            resources: of each process.
            placement: what is reserved beside them.
        """
        best = self.largest(self._room(resources, placement))
        return best if best.num_processes > plan.num_processes else None

    def _room(self, resources: RankResources, placement: PlacementOptions) -> int:
        free = free_resources(self._held)
        rank = resources.bundle()
        return count_places(free.values(), rank, placement.bundles_beside(rank))

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Afterwards the autoscaler is asked for nothing."""
        try:
            yield
        finally:
            if self._asked and ray.is_initialized():
                call_behind(partial(request_resources, bundles=[])).join(RELEASE_S)
            self._asked = False
