"""Execution styles of one model: pipelined, multiplexed, or whichever is predicted to be faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from raymm.config.planning_options import MULTIPLEXED, PIPELINED
from raymm.costs.load import Load
from raymm.costs.named_devices import CPU
from raymm.costs.scaling_estimates import (
    ModuleShape,
    edges_of,
    filled_profile,
    shapes_of,
    slowed_layers,
)
from raymm.draw.row_table import time_text
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.planning.inputs import PlanInputs, loads_of
from raymm.planning.mapping_inputs import (
    DoesNotFitError,
    MappedBatch,
    MappingInputs,
    mapping_inputs,
    read_surfaces,
)
from raymm.planning.multiplexed import PlannedMultiplexed
from raymm.planning.plan import Planned
from raymm.planning.request import PlanRequest
from raymm.scheduler.costs.devices import find_device
from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.graph.strict_json import MultiplexError
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.search.stage_space import StageSearchError


class NoWholeDeviceError(MultiplexError):
    """Surfaces do not say what a module takes on one whole device, alone."""


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
        seconds = self.seconds
        return min(seconds, key=lambda style: seconds[style]) if seconds else None

    @property
    def seconds(self) -> dict[str, float]:
        """Predicted seconds of a step, of each style that fits."""
        planned = {PIPELINED: self.pipelined, MULTIPLEXED: self.multiplexed}
        return {
            style: plan.seconds for style, plan in planned.items()
            if plan is not None and style not in self.refused
        }

    def compared(self) -> StyleComparison:
        """This, with what the baselines of both styles make of the same. They are solved now."""
        return replace(
            self, pipelined=self.pipelined and self.pipelined.compared(),
            multiplexed=self.multiplexed and self.multiplexed.compared(),
        )

    def explain(self) -> str:
        """Which is faster, by how much, and what the two numbers do not have in common."""
        lines = [f"{style} does not run: {reason}" for style, reason in self.refused.items()]
        by_style = self.seconds
        best = self.style
        if best is not None and len(by_style) == 2:
            other = next(s for s in by_style if s != best)
            lines.append(
                f"{best} is predicted to be {by_style[other] / by_style[best]:.2f} times as fast: "
                f"{time_text(by_style[best])} against {time_text(by_style[other])} per step of "
                f"{self.batch} samples"
            )
        elif best is not None:
            seconds = time_text(by_style[best])
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


def compare_styles(inputs: PlanInputs, plan: Plan | None = None) -> StyleComparison:
    """Plan a model both ways, by the same costs.

    Args:
        inputs: of both. Where surfaces are given, the costs of layers are scaled to what a module
            takes by its surface on one whole device.
        plan: a pipelined plan to compare with, instead of searching one; of as many ranks
            (:func:`with_ranks_of`) and microbatches as asked for.

    Raises:
        PlanError, DeviceError, ProfileError, LoadError, MultiplexError: naming what is wrong, but
            not if one style does not fit.
    """
    workload = inputs.workload
    if plan is not None and plan.num_microbatches != workload.microbatches:
        raise MultiplexError(
            f"microbatches is {workload.microbatches}; the given plan has {plan.num_microbatches}"
        )
    refused: dict[str, str] = {}
    basis = _Basis.of(inputs)
    try:
        # Lengths are for pipelines too; whether surfaces are of them is checked below.
        mapped = basis.mapping_inputs(replace(inputs.request, tokens={}))
        multiplexed = PlannedMultiplexed.of(mapped)
        if multiplexed.unfit:
            refused[MULTIPLEXED] = multiplexed.unfit
    except DoesNotFitError as error:
        multiplexed, refused[MULTIPLEXED] = None, str(error)
    pipelined = None
    try:
        costs = replace(inputs.costs, profile=basis.profile())
        if plan is not None:
            pipelined = Planned.evaluated(replace(plan, profile=None), costs, inputs.memory_limit)
        else:
            pipelined = Planned.of(replace(inputs, costs=costs))
        if pipelined.unfit:
            refused[PIPELINED] = pipelined.unfit
    except (NoWholeDeviceError, StageSearchError) as error:
        refused[PIPELINED] = str(error)
    return StyleComparison(pipelined, multiplexed, refused, workload.batch, workload.microbatches)


def with_ranks_of(plan: Plan, request: PlanRequest) -> PlanRequest:
    """The request for as many ranks as a plan has, so that both styles have the same devices.

    Raises:
        MultiplexError: it is for another number.
    """
    if request.ranks not in (None, plan.num_ranks):
        raise MultiplexError(
            f"ranks is {request.ranks}, but the given plan (parallel) is for {plan.num_ranks}; "
            f"accepted: {plan.num_ranks}, or none"
        )
    return replace(request, ranks=plan.num_ranks)


def plan_step_multiplexed(inputs: PlanInputs) -> PlannedMultiplexed:
    """The multiplexed half of :func:`compare_styles`: all samples of a step at once.

    Raises:
        DoesNotFitError: a module fits no GPU.
        MultiplexError: naming what is wrong.
    """
    return PlannedMultiplexed.of(_Basis.of(inputs).mapping_inputs(inputs.request))


@dataclass(frozen=True)
class _Basis:
    """What both styles are judged by."""

    inputs: PlanInputs
    shapes: tuple[ModuleShape, ...]
    loads: Mapping[str, Load]  # of a microbatch
    notes: tuple[str, ...]

    @classmethod
    def of(cls, inputs: PlanInputs) -> _Basis:
        costs = inputs.costs
        loads = loads_of(inputs.model, inputs.workload, inputs.request.tokens).by_module
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
        return cls(inputs, shapes_of(inputs.model), loads, notes)

    def mapping_inputs(self, request: PlanRequest) -> MappingInputs:
        """Of a mapping of all microbatches of a step at once."""
        inputs, has_surfaces = self.inputs, request.surfaces is not None
        count, dtype = inputs.workload.microbatches, inputs.workload.dtype
        loads = {
            name: Load(load.samples * count, load.tokens,
                       None if load.labels is None else load.labels * count)
            for name, load in self.loads.items()
        }
        profile = inputs.costs.profile
        measured = None if has_surfaces or profile.source != "measured" else (profile, self.loads)
        named = not has_surfaces or request.device is not None
        return mapping_inputs(
            self.shapes, edges_of(inputs.model, [shape.name for shape in self.shapes]), request,
            MappedBatch(loads[LANGUAGE_MODEL].samples, dtype, dtype, loads, measured),
            inputs.costs.device or find_device(CPU) if named else None,
            () if has_surfaces else self.notes,
        )

    def profile(self) -> CostProfile:
        """Layer costs that pipelines are judged by.

        Raises:
            NoWholeDeviceError: surfaces do not say them.
            MultiplexError: surfaces are of other lengths.
        """
        costs, request = self.inputs.costs, self.inputs.request
        if request.surfaces is None:
            if costs.profile.source == "measured":
                return costs.profile
            device = costs.device or find_device(CPU)
            return filled_profile(costs.profile, self.shapes, self.loads, device)
        layers = dict(costs.profile.modules)
        surfaces, conditions = read_surfaces(
            request.surfaces, [shape.name for shape in self.shapes]
        )
        if conditions is not None:
            conditions.check(tokens=request.tokens)
        for shape, surface in zip(self.shapes, surfaces, strict=True):
            if surface.degrees[0] > 1 or surface.quotas[-1] < surface.steps:
                raise NoWholeDeviceError(
                    f"surfaces say nothing of {shape.name!r} on one whole device (degrees are "
                    f"{list(surface.degrees)}, quotas {list(surface.quotas)} of {surface.steps}), "
                    "by which layers of pipelines are judged"
                )
            alone = surface.seconds_at(1, surface.steps) / self.inputs.workload.microbatches
            factor = alone / shape.seconds(layers[shape.name])
            layers[shape.name] = slowed_layers(layers[shape.name], factor)
        return replace(costs.profile, modules=layers)
