"""The plan that a run starts with where nobody gives it one, in the style that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from raymm.actors.rank.rank_group import RankResources
from raymm.data import DataConfig
from raymm.model.multimodal import MultimodalModule
from raymm.planning.multiplexed import PlannedMultiplexed
from raymm.planning.plan_model import Planned
from raymm.planning.plan_view import summary
from raymm.planning.request import PlanRequest, request_for_cluster
from raymm.planning.styles import (
    AUTO,
    PIPELINED,
    StyleComparison,
    compare_styles,
    plan_multiplexed_request,
)
from raymm.scheduler.graph.strict_json import MultiplexError
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.plan.plan import Plan, PlanError


@dataclass(frozen=True)
class PlannedRun:
    """What was planned, and what to say of it."""

    plan: Plan | StageMapping
    lines: tuple[str, ...]


def plan_for_cluster(
    request: PlanRequest, model: MultimodalModule, data: DataConfig | Sequence[Any], *,
    device: str, resources: RankResources, worker_cpus: float, dtype: str,
) -> PlannedRun:
    """Plan a run for the connected cluster.

    Args:
        request, model, data, device, resources, worker_cpus: as of
            :func:`raymm.planning.request.request_for_cluster`.
        dtype: the run's precision.

    Raises:
        StageSearchError, PlanError, MultiplexError: if nothing fits.
        DeviceError, ProfileError, LoadError, DataError.
    """
    request, shape, note = request_for_cluster(
        request, model, data, device=device, resources=resources, worker_cpus=worker_cpus
    )
    if request.style == PIPELINED:
        return _pipelined(request.plan(model, shape, dtype, note))
    notes = () if note is None else (f"note: {note}",)
    if request.style == AUTO:
        compared = compare_styles(model, request, shape, dtype)
        found = _faster(compared)
        lines = (*found.lines, compared.explain().splitlines()[0])
    else:
        # For what runs at once: one microbatch.
        shape = replace(shape, microbatches=1)
        found = _multiplexed(plan_multiplexed_request(model, request, shape, dtype))
        lines = found.lines
    return replace(found, lines=(*lines, *notes))


def _pipelined(planned: Planned) -> PlannedRun:
    notes = (f"note: {note}" for note in planned.notes)
    return PlannedRun(planned.plan, (*summary(planned), *notes))


def _multiplexed(planned: PlannedMultiplexed) -> PlannedRun:
    """
    Raises:
        MultiplexError: it needs too much memory.
    """
    if planned.unfit:
        raise MultiplexError(planned.unfit)
    mapping, placed = planned.mapping, []
    for stage in mapping.stages:
        placed.append(" | ".join(
            f"{one.module} on {len(one.gpus)} x {one.quota}/{mapping.steps}"
            for one in stage.placements
        ))
    notes = (f"note: {note}" for note in planned.notes)
    first = planned.explain().splitlines()[0]
    return PlannedRun(mapping, (f"mapping: {', then '.join(placed)}", first, *notes))


def _faster(compared: StyleComparison) -> PlannedRun:
    """
    Raises:
        PlanError: neither style fits.
    """
    if compared.style is None:
        raise PlanError("neither style fits: " + "; ".join(compared.refused.values()))
    if compared.style == PIPELINED:
        assert compared.pipelined is not None  # as it fits
        return _pipelined(compared.pipelined)
    assert compared.multiplexed is not None
    return _multiplexed(compared.multiplexed)
