"""Inputs of a search for a plan: model, workload, request, costs and memory limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from raymm.config.planning_options import PIPELINED
from raymm.costs.analytic import analytic_profile
from raymm.costs.load import Load
from raymm.costs.named_devices import CPU, device_called
from raymm.costs.optimizer_state import with_optimizer
from raymm.costs.step_flops import count_flops
from raymm.costs.workload import (
    ModuleWorkloads,
    changed_tokens,
    check_tokens,
    microbatch_workload,
    token_workload,
)
from raymm.errors import ModelError, PlanError
from raymm.model.features import GIVEN_SIZES, MULTIPLEXED_PLANS
from raymm.model.model import Model
from raymm.model.multimodal import MultimodalModule
from raymm.planning.request import PlanRequest, Workload
from raymm.scheduler.costs.device_memory import usable_bytes
from raymm.scheduler.costs.devices import DeviceSpec, find_device
from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.costs.profile_table import ProfileTable
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.field_checks import check_number
from raymm.scheduler.schedule.memory import GIB
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.search.module_degrees import DegreeChoices
from raymm.scheduler.search.options import PlanProblem


@dataclass(frozen=True)
class Costs:
    """Costs that a plan is evaluated with.

    Attributes:
        profile: costs of every layer for one microbatch, with the device's links.
        device: None if the profile was measured on a device that is not in raymm's table.
        notes: remarks to show to the user.
        dollars_per_gpu_hour: price of a device, if known.
        flops: necessary FLOPs of a microbatch, as for the MFU of a run; None if unknown.
    """

    profile: CostProfile
    device: DeviceSpec | None = None
    ranks_per_node: int = 8
    notes: tuple[str, ...] = ()
    dollars_per_gpu_hour: float | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        if self.device is not None and self.profile.links is None:
            profile = replace(self.profile, links=self.network.links)
            object.__setattr__(self, "profile", profile)

    @property
    def network(self) -> Network:
        """Links of the device; messages take no time if the device is unknown."""
        if self.device is None:
            return Network()
        return Network(self.device.within_node, self.device.across_nodes, self.ranks_per_node)

    def memory_limit(self, gib: float | None) -> int | None:
        """Return the bytes that a rank may use: ``gib``, or the memory of a known GPU without the
        driver's context. None (no limit) on CPUs. Raises PlanError if ``gib`` is not above 0."""
        if gib is not None:
            if not gib > 0:
                raise PlanError(f"memory_gib is {gib}; it must be above 0")
            return int(gib * GIB)
        if self.device is None or self.device.name == CPU:
            return None
        return usable_bytes(self.device)


@dataclass(frozen=True)
class PlanInputs:
    """Inputs of a search for a plan.

    Attributes:
        ranks: number of devices; a plan may use fewer.
        memory_limit: bytes per rank; None for no limit.

    Raises:
        PlanError: ``ranks`` is out of range.
    """

    model: Model
    workload: Workload
    request: PlanRequest
    costs: Costs
    ranks: int
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        check_number("ranks", self.ranks)

    @classmethod
    def of(
        cls, model: Model, request: PlanRequest, workload: Workload,
        costs: Costs | None = None, notes: Sequence[str] = (),
    ) -> PlanInputs:
        """Build the inputs of a request whose ``ranks`` are set. ``costs`` default to
        :func:`costs_of`. Raises PlanError, which names the field and what is accepted."""
        if request.ranks is None:
            raise PlanError("ranks is not given; accepted: the number of devices, at least 1")
        costs = costs or costs_of(model, request, workload)
        costs = replace(costs, notes=(*costs.notes, *notes))
        limit = costs.memory_limit(request.memory_gib)
        return cls(model, workload, request, costs, request.ranks, limit)

    def problem(self, degrees: Mapping[str, DegreeChoices] | None = None) -> PlanProblem:
        """Return the problem that the pipeline planner solves. ``degrees`` are those that modules
        may have in addition to pipeline stages."""
        request = self.request
        return PlanProblem(
            self.model.graph, self.costs.profile, self.ranks, self.workload.microbatches,
            self.memory_limit, self.costs.network, degrees=degrees or {},
            schedules=tuple(request.schedules), layouts=tuple(request.layouts),
            recompute=request.recompute,
        )

    @property
    def parts(self) -> MultimodalModule:
        """The model, for a multiplexed plan. Raises ModelError for a Hugging Face VLM."""
        self.model.require(MULTIPLEXED_PLANS, f"parallel.style is {self.request.style!r}")
        return cast(MultimodalModule, self.model)

    @property
    def graph(self) -> ModuleGraph:
        return self.model.graph


def costs_of(
    model: Model, request: PlanRequest, workload: Workload
) -> Costs:
    """Return the costs of a model's layers: measured if the request has a profile, otherwise
    analytic.

    The device defaults to the profile's device, or to ``"cpu"`` without a profile. Tokens per
    sample of the request take precedence over those of the workload.

    Raises:
        PlanError: names the field and what is accepted.
    """
    check_tokens(model, request.tokens)
    device = None if request.device is None else find_device(request.device)
    if request.profile is not None:
        table = request.profile_table
        totals = {name: _total(table, name, count) for name, count in request.tokens.items()}
        measured = table.at(totals)
        measured = with_optimizer(measured, model, workload.optimizer)
        measured, notes = _without_kept(measured, model, request)
        device = device or device_called(table.device)
        return Costs(
            measured, device, request.ranks_per_node, notes, request.dollars_per_gpu_hour
        )
    loads = loads_of(model, workload, request.tokens)
    notes = loads.notes
    if device is None:
        device = find_device(CPU)
        notes += ("no device is named: costs are those of one CPU core",)
    counted = analytic_profile(model, loads.by_module, device, workload.dtype)
    counted = with_optimizer(counted, model, workload.optimizer)
    counted, cache_notes = _without_kept(counted, model, request)
    return Costs(
        counted, device, request.ranks_per_node, (*notes, *cache_notes),
        request.dollars_per_gpu_hour, None if cache_notes else _flops(model, loads.by_module),
    )


def _flops(model: Model, loads: Mapping[str, Load]) -> float | None:
    try:
        return count_flops(model).of_loads(loads)
    except (ModelError, PlanError):  # a layer that cannot be counted
        return None


def _without_kept(
    profile: CostProfile, model: Model, request: PlanRequest
) -> tuple[CostProfile, tuple[str, ...]]:
    """Return costs of epochs in which the features of frozen first blocks are cached, and notes."""
    if not request.keeps_features or request.style != PIPELINED:
        return profile, ()
    modules, cached = dict(profile.modules), []
    for name in model.encoder_names:
        node = model.graph.node(name)
        blocks = node.frozen_blocks
        if not model.separate_features or not blocks or (
            blocks == node.num_blocks and not node.projector
        ):
            continue
        cached.append(name)
        modules[name] = tuple(
            replace(layer, forward=0.0) if index < blocks else layer
            for index, layer in enumerate(modules[name])
        )
    notes = (f"planned for epochs in which the features of {', '.join(cached)} are cached",)
    return replace(profile, modules=modules), notes if cached else ()


def loads_of(
    model: Model, workload: Workload, tokens: Mapping[str, int]
) -> ModuleWorkloads:
    """Return the load of one microbatch on each module. ``tokens`` per sample replace the
    microbatch's."""
    complete = set(tokens) >= {*model.encoder_names, model.text_module}
    if workload.microbatch is None or complete:
        model.require(GIVEN_SIZES, "there is no data to read sizes from")
        return token_workload(
            cast(MultimodalModule, model), tokens, workload.samples, workload.text
        )
    return changed_tokens(microbatch_workload(model, workload.read_microbatch()), tokens)


def _total(table: ProfileTable, name: str, each: int) -> int:
    """Return the tokens of a microbatch, given tokens per sample and the samples of the default
    row."""
    if name not in table.modules:
        raise PlanError(
            f"tokens name {name!r}; the profile's modules are {', '.join(table.modules)}"
        )
    default = table.default[name]
    row = next((r for r in table.modules[name] if r.tokens == default), table.modules[name][0])
    return each * row.samples
