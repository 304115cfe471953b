"""Automatic planning of a run that has no plan, for the connected cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.placement.node_types import all_types, reachable_resources
from raymm.actors.rank.rank_resources import RankResources
from raymm.config.planning_options import AUTO, PIPELINED
from raymm.costs.named_devices import cluster_device
from raymm.data import DataConfig
from raymm.errors import PlanError
from raymm.model.model import Model
from raymm.planning.inputs import PlanInputs
from raymm.planning.multiplexed import PlannedMultiplexed
from raymm.planning.plan import Planned
from raymm.planning.request import PlanRequest, Workload, whole_microbatches
from raymm.planning.search import search_pipelines
from raymm.planning.styles import (
    StyleComparison,
    compare_styles,
    plan_step_multiplexed,
    step_plan,
)
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.progress.search_control import SearchControl

# Default limit on the number of ranks if they are CPU processes.
MAX_CPU_RANKS = 8


@dataclass(frozen=True)
class PlannedRun:
    """A plan, and lines to show to the user."""

    plan: Plan
    lines: tuple[str, ...]


def plan_for_cluster(
    request: PlanRequest, model: Model, data: DataConfig | Sequence[Any], *,
    dtype: str, optimizer: OptimizerConfig, note: str | None = None,
    say: Callable[[str], None] | None = None,
) -> PlannedRun:
    """Plan a run for the connected cluster.

    Args:
        request: with the ranks and the device of the cluster (:func:`request_for_cluster`).
        note: shown with the plan.
        say: called with a progress line every few seconds of a search for pipelines.

    Raises:
        PlanError, DataError: names what is wrong and what is accepted.
        NoPlanError: no plan fits.
    """
    assert request.ranks is not None
    if isinstance(data, DataConfig):
        workload = Workload.of_config(data, model.encoder_names, dtype)
    else:
        workload = Workload.of_batches(data, model.encoder_names, request.ranks, dtype)
    workload = replace(workload, optimizer=optimizer)
    mapped = whole_microbatches(data)
    if request.style not in (PIPELINED, AUTO):  # costs are those of one microbatch
        workload = replace(workload, microbatches=1)
    notes = () if note is None else (note,)
    if request.style == PIPELINED:
        inputs = PlanInputs.of(model, request, workload, notes=notes)
        planned = search_pipelines(inputs, SearchControl(request.time_limit, say))
        return _pipelined(planned.finished(request))
    inputs = PlanInputs.of(model, request, workload)
    if request.style == AUTO:
        # Batches in memory can be split as the plan requires; a data section fixes the number.
        at_once = not isinstance(data, DataConfig)
        compared = compare_styles(
            inputs, at_once=at_once, control=SearchControl(request.time_limit, say)
        )
        run = _faster(compared, inputs, mapped)
    else:
        run = _multiplexed(plan_step_multiplexed(inputs), inputs, mapped)
    return replace(run, lines=(*run.lines, *(f"note: {note}" for note in notes)))


def request_for_cluster(
    request: PlanRequest, device: str, resources: RankResources, worker_cpus: float
) -> tuple[PlanRequest, str | None]:
    """Fill the unset fields of a request from the connected cluster, and return the request with a
    note if the cluster's device is not in raymm's table. ``worker_cpus`` are reserved for data
    workers."""
    if request.ranks is None:
        request = replace(request, ranks=cluster_ranks(resources, worker_cpus))
    per_node = min(request.ranks_per_node, ranks_of_a_node(resources))
    request = replace(request, ranks_per_node=per_node)
    if request.device is not None or request.profile is not None:
        return request, None
    name, note = cluster_device(device)
    return replace(request, device=name), note


def cluster_ranks(resources: RankResources, worker_cpus: float = 0.0) -> int:
    """Return the number of ranks that fit on the connected cluster next to the data workers.

    Nodes that the autoscaler may add count. The result is one rank per GPU share, on CPUs at most
    :data:`MAX_CPU_RANKS`, and at least 1. Raises PlanError if the autoscaler may add any number of
    nodes.
    """
    has = reachable_resources()
    limits = [
        (has.get(name, 0.0) - (worker_cpus if name == "CPU" else 0.0)) / amount + 1e-9
        for name, amount in resources.bundle().items() if amount > 0
    ]
    if not resources.gpus:
        limits.append(MAX_CPU_RANKS)
    if math.isinf(most := min(limits)):
        raise PlanError(
            "planning.ranks is not given, and the cluster's autoscaler may add any number of "
            "nodes; accepted: the number of ranks to plan for"
        )
    return max(1, int(most))


def ranks_of_a_node(resources: RankResources) -> int:
    """Return the number of ranks per node, at least 1, for the node type that can hold most ranks.

    Links within a node connect its own GPUs only: pods with one GPU each have none.
    """
    rooms = [(kind.holds(resources.bundle()), kind.most) for kind in all_types()]
    room, _ = max(rooms, key=lambda each: each[0] and each[0] * each[1], default=(1, 1))
    return max(1, room)


def _pipelined(planned: Planned) -> PlannedRun:
    notes = (f"note: {note}" for note in planned.notes)
    return PlannedRun(planned.plan, (*planned.summary(), *notes))


def _multiplexed(
    planned: PlannedMultiplexed, inputs: PlanInputs, microbatches: int
) -> PlannedRun:
    if planned.unfit:
        raise PlanError(planned.unfit)
    mapping, placed = planned.mapping, []
    for stage in mapping.stages:
        placed.append(" | ".join(
            f"{placement.module} on {len(placement.gpus)} x {placement.quota}/{mapping.steps}"
            for placement in stage.placements
        ))
    notes = (f"note: {note}" for note in planned.notes)
    first = planned.explain().splitlines()[0]
    plan = replace(step_plan(inputs, planned), num_microbatches=microbatches)
    return PlannedRun(plan, (f"mapping: {', then '.join(placed)}", first, *notes))


def _faster(
    compared: StyleComparison, inputs: PlanInputs, microbatches: int
) -> PlannedRun:
    plan = compared.chosen
    if plan is None and compared.style is None:
        raise PlanError("neither style fits: " + "; ".join(compared.refused.values()))
    lines = tuple(compared.explain().splitlines())
    if compared.between is not None:
        assert plan is not None
        return PlannedRun(plan, lines[: -len(compared.common_lines)])
    if plan is not None:
        assert compared.pipelined is not None  # as it fits
        run = _pipelined(compared.pipelined)
    else:
        assert compared.multiplexed is not None
        run = _multiplexed(compared.multiplexed, inputs, microbatches)
    return replace(run, lines=(*run.lines, lines[0]))
