"""Execution styles of one model: pipelined, multiplexed, or whichever is predicted to be faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raymm.costs.layer_count import Load
from raymm.costs.named_devices import CPU
from raymm.costs.scaling_estimates import (
    ModuleShape,
    edges_of,
    filled_profile,
    shapes_of,
    slowed_layers,
)
from raymm.costs.workload import changed_tokens, microbatch_workload, token_workload
from raymm.model.multimodal import LANGUAGE_MODEL, MultimodalModule
from raymm.planning.degrees import DegreeRequest
from raymm.planning.mapping_view import time_text
from raymm.planning.multiplexed import (
    DoesNotFitError,
    MappingRequest,
    PlannedMultiplexed,
    plan_shapes,
    read_surfaces,
)
from raymm.planning.plan_model import Planned, plan_model
from raymm.planning.planned_costs import Costs
from raymm.planning.request import DataShape, PlanRequest
from raymm.planning.strategies import Search
from raymm.scheduler.costs.devices import DeviceSpec, find_device
from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.graph.strict_json import MultiplexError
from raymm.scheduler.multiplex.problem import STEPS
from raymm.scheduler.multiplex.surface import ScalingSurface
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.search.stage_space import StageSearchError

PIPELINED, MULTIPLEXED, AUTO = "pipelined", "multiplexed", "auto"
class NoWholeDeviceError(MultiplexError):
    """Surfaces do not say what a module takes on one whole device, alone."""


@dataclass(frozen=True)
class MultiplexOptions:
    """What only multiplexed planning is asked; fields as of :func:`raymm.plan_multiplexed`."""

    surfaces: str | Path | tuple[ScalingSurface, ...] | None = None
    interference: Any = None
    steps: int = STEPS
    strategy: str = "auto"
    deadline_seconds: float | None = None


@dataclass(frozen=True)
class StyleComparison:
    """A pipelined plan and a multiplexed mapping of the same model, batch and devices.

    Attributes:
        pipelined, multiplexed: each; None where it was refused.
        refused: why, by style.
        batch: samples of a step.
        microbatches: that the pipelined plan splits it into.
    """

    pipelined: Planned | None
    multiplexed: PlannedMultiplexed | None
    refused: Mapping[str, str]
    batch: int
    microbatches: int

    @property
    def style(self) -> str | None:
        """The faster one of those that fit; None if neither does."""
        found = self.seconds
        return min(found, key=lambda style: found[style]) if found else None

    @property
    def seconds(self) -> dict[str, float]:
        """Predicted seconds of a step, of each style that fits."""
        planned = {PIPELINED: self.pipelined, MULTIPLEXED: self.multiplexed}
        return {
            style: one.seconds for style, one in planned.items()
            if one is not None and style not in self.refused
        }

    def explain(self) -> str:
        """Which is faster, by how much, and what the two numbers do not have in common."""
        lines = [f"{style} does not run: {reason}" for style, reason in self.refused.items()]
        found = self.seconds
        best = self.style
        if best is not None and len(found) == 2:
            other = next(s for s in found if s != best)
            lines.append(
                f"{best} is predicted to be {found[other] / found[best]:.2f} times as fast: "
                f"{time_text(found[best])} against {time_text(found[other])} per step of "
                f"{self.batch} samples"
            )
        elif best is not None:
            seconds = time_text(found[best])
            lines.append(f"{best} runs: {seconds} per step of {self.batch} samples")
        lines += [
            "the same for both: batch, devices, memory limit, frozen rules, the costs of layers "
            "(modules too small to fill a device are slower by the same rule)",
            f"pipelined: {self.microbatches} microbatches through cut modules; bubbles and "
            "messages between stages are counted, sums of gradients as far as the backward does "
            "not hide them; may recompute activations",
            "multiplexed: the whole batch at once through whole modules, so weights are read once; "
            "interference and sums of gradients (not hidden) are counted, messages between modules "
            "are not; keeps all activations",
        ]
        return "\n".join(lines)


def compare_styles(
    model: MultimodalModule, request: PlanRequest, data: DataShape, dtype: str,
    options: MultiplexOptions | None = None, given: Plan | None = None,
) -> StyleComparison:
    """Plan a model both ways, by the same costs.

    Args:
        model: the description.
        request: ranks (which must be known), device or profile, and what of pipelines is searched.
        data: microbatches and what they are.
        dtype: compute dtype.
        options: of multiplexing. Where surfaces are given, the costs of layers are scaled to what
            a module takes by its surface on one whole device.
        given: a pipelined plan to compare with, instead of searching one; of as many ranks and
            microbatches as asked for.

    Raises:
        PlanError, DeviceError, ProfileError, LoadError, MultiplexError: naming what is wrong, but
            not if one style does not fit.
    """
    options = options or MultiplexOptions()
    if given is not None:
        request = with_ranks_of(given, request)
        if given.num_microbatches != data.microbatches:
            raise MultiplexError(
                f"microbatches is {data.microbatches}; the given plan has {given.num_microbatches}"
            )
    basis = _Basis.of(model, request, data, dtype)
    refused: dict[str, str] = {}
    batch = data.samples * data.microbatches
    try:
        # Lengths are for pipelines too; whether surfaces are of them is checked below.
        multiplexed = basis.multiplexed(model, replace(request, tokens={}), options)
        if multiplexed.unfit:
            refused[MULTIPLEXED] = multiplexed.unfit
    except DoesNotFitError as error:
        multiplexed, refused[MULTIPLEXED] = None, str(error)
    try:
        costs = replace(basis.costs, profile=basis.profile(options.surfaces, request.tokens))
    except NoWholeDeviceError as error:
        refused[PIPELINED] = str(error)
        return StyleComparison(None, multiplexed, refused, batch, data.microbatches)
    limit = costs.memory_limit(request.memory_gib)
    try:
        if given is not None:
            pipelined = Planned.evaluated(replace(given, profile=None), costs, limit)
        else:
            ranks = request.ranks
            assert ranks is not None  # see _Basis.of
            search = Search(
                ranks, data.microbatches, limit, strategy=request.strategy,
                schedules=request.schedules, layouts=request.layouts, recompute=request.recompute,
                radius=request.radius,
            )
            pipelined = plan_model(model, costs, search, degrees=DegreeRequest.of(request.degrees))
        if pipelined.unfit:
            refused[PIPELINED] = pipelined.unfit
    except StageSearchError as error:
        pipelined, refused[PIPELINED] = None, str(error)
    return StyleComparison(pipelined, multiplexed, refused, batch, data.microbatches)


def with_ranks_of(given: Plan, request: PlanRequest) -> PlanRequest:
    """The request for as many ranks as a plan has, so that both styles have the same devices.

    Raises:
        MultiplexError: it is for another number.
    """
    if request.ranks not in (None, given.num_ranks):
        raise MultiplexError(
            f"ranks is {request.ranks}, but the given plan (parallel) is for {given.num_ranks}; "
            f"accepted: {given.num_ranks}, or none"
        )
    return replace(request, ranks=given.num_ranks)


def plan_multiplexed_request(
    model: MultimodalModule, request: PlanRequest, data: DataShape, dtype: str,
    options: MultiplexOptions | None = None,
) -> PlannedMultiplexed:
    """The multiplexed half of :func:`compare_styles`.

    Raises:
        DoesNotFitError: a module fits no GPU.
        MultiplexError, PlanError, DeviceError, ProfileError, LoadError: naming what is wrong.
    """
    options = options or MultiplexOptions()
    return _Basis.of(model, request, data, dtype).multiplexed(model, request, options)


@dataclass(frozen=True)
class _Basis:
    """What both styles are judged by."""

    costs: Costs
    shapes: tuple[ModuleShape, ...]
    loads: Mapping[str, Load]  # of a microbatch
    microbatches: int
    dtype: str
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls, model: MultimodalModule, request: PlanRequest, data: DataShape, dtype: str
    ) -> _Basis:
        if request.ranks is None:
            raise MultiplexError("ranks is not given; accepted: the number of devices, at least 1")
        costs = request.costs(model, data, dtype)
        loads = _loads(model, data, request.tokens)
        notes = costs.notes
        if costs.profile.source == "measured":
            tokens = costs.profile.tokens
            loads = {
                name: replace(load, tokens=max(1, tokens[name] // load.samples), labels=None)
                for name, load in loads.items()
            }
            if costs.device is None:
                notes += (f"the profile's device, {costs.profile.device}, is not in raymm's table: "
                          "it is taken to have no quotas, and links of CPUs",)  # fmt: skip
        return cls(costs, shapes_of(model), loads, data.microbatches, dtype, notes)

    @property
    def device(self) -> DeviceSpec:
        return self.costs.device or find_device(CPU)

    def multiplexed(
        self, model: MultimodalModule, request: PlanRequest, options: MultiplexOptions
    ) -> PlannedMultiplexed:
        count = self.microbatches
        loads = {
            name: Load(load.samples * count, load.tokens,
                       None if load.labels is None else load.labels * count)
            for name, load in self.loads.items()
        }
        measured = self.costs.profile.source == "measured" and options.surfaces is None
        named = options.surfaces is None or request.device is not None
        assert request.ranks is not None  # see of
        asked = MappingRequest(
            gpus=request.ranks, device=self.device if named else None, surfaces=options.surfaces,
            interference=options.interference, memory_gib=request.memory_gib,
            batch=loads[LANGUAGE_MODEL].samples, dtype=self.dtype, steps=options.steps,
            strategy=options.strategy, ranks_per_node=request.ranks_per_node,
            deadline_seconds=options.deadline_seconds, precision=self.dtype,
            tokens=request.tokens or None,
        )
        return plan_shapes(
            self.shapes, edges_of(model, [shape.name for shape in self.shapes]), asked,
            loads=loads, measured=(self.costs.profile, self.loads) if measured else None,
            notes=self.notes if options.surfaces is None else (),
        )

    def profile(self, surfaces: Any, tokens: Mapping[str, int]) -> CostProfile:
        """Layer costs that pipelines are judged by.

        Raises:
            NoWholeDeviceError: surfaces do not say them.
            MultiplexError: surfaces are of other lengths.
        """
        if surfaces is None:
            if self.costs.profile.source == "measured":
                return self.costs.profile
            return filled_profile(self.costs.profile, self.shapes, self.loads, self.device)
        layers = dict(self.costs.profile.modules)
        found, conditions = read_surfaces(surfaces, [shape.name for shape in self.shapes])
        if conditions is not None:
            conditions.check(tokens=tokens)
        for shape, surface in zip(self.shapes, found, strict=True):
            if surface.degrees[0] > 1 or surface.quotas[-1] < surface.steps:
                raise NoWholeDeviceError(
                    f"surfaces say nothing of {shape.name!r} on one whole device (degrees are "
                    f"{list(surface.degrees)}, quotas {list(surface.quotas)} of {surface.steps}), "
                    "by which layers of pipelines are judged"
                )
            alone = surface.seconds_at(1, surface.steps) / self.microbatches
            factor = alone / shape.seconds(layers[shape.name])
            layers[shape.name] = slowed_layers(layers[shape.name], factor)
        return replace(self.costs.profile, modules=layers)


def _loads(
    model: MultimodalModule, data: DataShape, tokens: Mapping[str, int]
) -> Mapping[str, Load]:
    if data.microbatch is None or set(tokens) >= {*model.encoder_names, LANGUAGE_MODEL}:
        return token_workload(model, tokens, data.samples, data.text).by_module
    return changed_tokens(microbatch_workload(model, data.microbatch()), tokens).by_module
