"""Execution styles of one model: pipelined, multiplexed, or whichever is predicted to be faster."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
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
from raymm.errors import NoPlanError, PlanError
from raymm.layout.mapping_plan import plan_of_mapping
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.planning.inputs import PlanInputs, loads_of
from raymm.planning.mapping_inputs import (
    MOST_GIB,
    MappedBatch,
    MappingInputs,
    mapping_inputs,
    read_surfaces,
)
from raymm.planning.multiplexed import PlannedMultiplexed
from raymm.planning.plan import Planned
from raymm.planning.request import PlanRequest
from raymm.planning.search import cut_modules, refused_cuts, search_pipelines
from raymm.scheduler.costs.devices import find_device
from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.costs.sharing import DeviceSharing
from raymm.scheduler.multiplex.iteration_memory import iteration_memory
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.progress.search_control import SearchControl
from raymm.scheduler.schedule.process_costs import layer_of_samples
from raymm.scheduler.search.evaluation import Option, evaluate
from raymm.scheduler.styles.blocks import StyleProblem, halved_counts
from raymm.scheduler.styles.style_search import BETWEEN, StyleSearch, search_between

# Searches for a mapping that fits by the account of memory of all plans.
TIGHTENED = 4


@dataclass(frozen=True)
class StyleComparison:
    """A pipelined plan and a multiplexed mapping of the same model, batch and devices.

    Attributes:
        pipelined, multiplexed: each; None where it was refused.
        refused: why, by style.
        batch: samples of a step.
        microbatches: that the pipelined plan splits it into.
        between: the search that goes on from both; None where surfaces do not say what pipelines
            take, or nothing fits.
    """

    pipelined: Planned | None
    multiplexed: PlannedMultiplexed | None
    refused: Mapping[str, str]
    batch: int
    microbatches: int
    between: StyleSearch | None = None

    @property
    def chosen(self) -> Plan | None:
        """What runs: the fastest of both styles and between them, judged alike; where nothing was
        searched between them, that of the faster style if it is pipelined."""
        if self.between is not None:
            return self.between.best.plan
        return self.pipelined.plan if self.pipelined and self.style == PIPELINED else None

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
        return "\n".join([*lines, *self._between_lines(), *self.common_lines])

    @property
    def common_lines(self) -> list[str]:
        """What the two styles' numbers have in common, and what not."""
        return [
            "the same for both: batch, devices, memory limit, frozen rules, the costs of layers "
            "(modules too small to fill a device are slower by the same rule)",
            f"pipelined: {self.microbatches} microbatches through cut modules; bubbles and "
            "messages between stages are counted, gradient all-reduces where the backward does not "
            "hide them; may recompute activations",
            "multiplexed: the whole batch at once through whole modules, so weights are read once; "
            "interference and gradient all-reduces (not hidden) are counted, messages between "
            "modules are not; keeps all activations",
        ]


    def _between_lines(self) -> list[str]:
        search = self.between
        if search is None:
            return []
        best = search.best
        starts = ", ".join(
            f"{style} {time_text(option.seconds)}" for style, option in search.starts.items()
        )
        equal = [style for style, option in search.starts.items() if option is best]
        text = f"auto: {equal[0]} unchanged" if equal else f"auto: {best.label}"
        how = "all layouts without guests, then local moves" if search.exhaustive else "local moves"
        return [
            f"{text}, {time_text(best.seconds)} per step (all simulated, with messages, "
            f"interference and memory: {starts or 'neither style fits'}; {how}, {search.tried} "
            "plans tried)",
            *search.lines(),
        ]


def compare_styles(
    inputs: PlanInputs, plan: Plan | None = None, at_once: bool = True,
    control: SearchControl | None = None,
) -> StyleComparison:
    """Plan a model both ways, by the same costs, and between them.

    Args:
        inputs: of both. Where surfaces are given, the costs of layers are scaled to what a module
            takes by its surface on one whole device.
        plan: a pipelined plan to compare with, instead of searching one; of as many ranks
            (:func:`with_ranks_of`) and microbatches as asked for.
        at_once: whether a step's samples may be one microbatch; else a mapping is of one of the
            microbatches that are asked for.
        control: of the search between the styles; by default the request's time limit ends it.

    Raises:
        PlanError: naming what is wrong, but
            not if one style does not fit.
    """
    workload = inputs.workload
    if plan is not None and plan.num_microbatches != workload.microbatches:
        raise PlanError(
            f"microbatches is {workload.microbatches}; the given plan has {plan.num_microbatches}"
        )
    refused: dict[str, str] = {}
    basis = _Basis.of(inputs)
    try:
        # Lengths are for pipelines too; whether surfaces are of them is checked below.
        count = 1 if at_once else workload.microbatches
        multiplexed = basis.multiplexed(replace(inputs.request, tokens={}), count)
        if multiplexed.unfit:
            refused[MULTIPLEXED] = multiplexed.unfit
    except NoPlanError as error:
        multiplexed, refused[MULTIPLEXED] = None, str(error)
    pipelined = None
    try:
        costs = replace(inputs.costs, profile=basis.profile())
        if plan is not None:
            pipelined = Planned.evaluated(replace(plan, profile=None), costs, inputs.memory_limit)
        else:
            pipelined = search_pipelines(replace(inputs, costs=costs))
        if pipelined.unfit:
            refused[PIPELINED] = pipelined.unfit
    except (NoPlanError) as error:
        refused[PIPELINED] = str(error)
    compared = StyleComparison(
        pipelined, multiplexed, refused, workload.batch, workload.microbatches
    )
    try:
        counts = {workload.microbatches, count}
        counts.update(halved_counts(workload.microbatches) if at_once else ())
        profiles = {number: basis.shared_profile(number) for number in sorted(counts)}
    except NoPlanError:
        return compared
    starts = _starts(basis, compared, count)
    control = control or SearchControl(inputs.request.time_limit)
    return replace(compared, between=_between(inputs, starts, profiles, pipelined, control))


def _starts(
    basis: _Basis, compared: StyleComparison, microbatches: int
) -> dict[str, Option]:
    """Return the best plans of both styles, of those that fit, judged alike."""
    starts = {}
    if compared.pipelined is not None and PIPELINED not in compared.refused:
        starts[PIPELINED] = compared.pipelined.proposal.best
    if compared.multiplexed is not None and MULTIPLEXED not in compared.refused:
        plan = basis.plan(compared.multiplexed.mapping, microbatches)
        starts[MULTIPLEXED], _ = evaluate(plan, basis.inputs.costs.network, MULTIPLEXED)
    return starts


def _between(
    inputs: PlanInputs, starts: Mapping[str, Option], profiles: Mapping[int, CostProfile],
    pipelined: Planned | None, control: SearchControl,
) -> StyleSearch | None:
    """Searched again as long as it cuts what the probe cannot."""
    whole = set() if pipelined is None else set(pipelined.whole)
    sharing = next(iter(profiles.values())).sharing
    quotas = sharing is not None and any(
        surface.quotas[0] < surface.steps for surface in sharing.surfaces
    )
    while True:
        problem = StyleProblem(
            inputs.graph, profiles, inputs.ranks, inputs.memory_limit, inputs.costs.network,
            inputs.request.quota_steps if quotas else 1, frozenset(whole),
            tuple(inputs.request.schedules),
        )
        try:
            result = search_between(problem, starts, control)
        except PlanError:
            return None
        cut = cut_modules(result.best.plan) if result.best.layout == BETWEEN else []
        refused = refused_cuts(inputs.model, sorted(set(cut) - whole))
        if not refused:
            return result
        whole |= set(refused)


def with_ranks_of(plan: Plan, request: PlanRequest) -> PlanRequest:
    """The request for as many ranks as a plan has, so that both styles have the same devices.

    Raises:
        PlanError: it is for another number.
    """
    if request.ranks not in (None, plan.num_ranks):
        raise PlanError(
            f"ranks is {request.ranks}, but the given plan (parallel) is for {plan.num_ranks}; "
            f"accepted: {plan.num_ranks}, or none"
        )
    return replace(request, ranks=plan.num_ranks)


def plan_step_multiplexed(inputs: PlanInputs) -> PlannedMultiplexed:
    """The multiplexed half of :func:`compare_styles`: all samples of a step at once.

    Raises:
        NoPlanError: a module fits no GPU.
        PlanError: naming what is wrong.
    """
    return _Basis.of(inputs).multiplexed(inputs.request)


def step_plan(inputs: PlanInputs, planned: PlannedMultiplexed) -> Plan:
    """The plan that runs a mapping, with the costs and surfaces that it is predicted by, if those
    say what modules take on one whole device.

    Args:
        inputs: that the mapping follows from.
        planned: what :func:`plan_step_multiplexed` gave.
    """
    with suppress(NoPlanError):
        return _Basis.of(inputs).plan(planned.mapping, 1)
    return plan_of_mapping(inputs.parts, planned.mapping)


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
                          "it is assumed to have no quotas, and the links of CPUs",)  # fmt: skip
        return cls(inputs, shapes_of(inputs.parts), loads, notes)

    def mapping_inputs(self, request: PlanRequest, microbatches: int = 1) -> MappingInputs:
        """Of a mapping of a step's samples in so many microbatches, one after another."""
        inputs, has_surfaces = self.inputs, request.surfaces is not None
        count, dtype = inputs.workload.microbatches // microbatches, inputs.workload.dtype
        loads = {
            name: Load(load.samples * count, load.tokens,
                       None if load.labels is None else load.labels * count)
            for name, load in self.loads.items()
        }
        profile = inputs.costs.profile
        measured = None if has_surfaces or profile.source != "measured" else (profile, self.loads)
        named = not has_surfaces or request.device is not None
        return mapping_inputs(
            self.shapes, edges_of(inputs.parts, [shape.name for shape in self.shapes]), request,
            MappedBatch(
                loads[LANGUAGE_MODEL].samples, dtype, dtype, loads, measured, microbatches
            ),
            inputs.costs.device or find_device(CPU) if named else None,
            () if has_surfaces else self.notes,
        )

    def multiplexed(self, request: PlanRequest, microbatches: int = 1) -> PlannedMultiplexed:
        """Map a step's samples in so many microbatches so that the plan fits by the same account
        of memory as pipelines. The account of surfaces has neither messages nor what the system
        and updates take: where they do not fit, a mapping of less is searched.

        Raises:
            NoPlanError: a module fits no GPU.
        """
        inputs = self.mapping_inputs(request, microbatches)
        planned, limit = PlannedMultiplexed.of(inputs), self.inputs.memory_limit
        if limit is None or planned.unfit:
            return planned
        tighter, problem = planned, inputs.problem
        for _ in range(TIGHTENED):
            try:
                plan = self.plan(tighter.mapping, microbatches)
            except NoPlanError:
                return planned  # only surfaces say what fits
            option, reason = evaluate(plan, self.inputs.costs.network, MULTIPLEXED)
            needs = tuple(need.total for need in option.memory)
            if tighter is planned or reason is None:
                planned = replace(tighter, problem=inputs.problem, needs=needs, unfit=reason)
            counted = max(iteration_memory(inputs.problem, tighter.mapping))
            room = counted - max(1, max(needs) - limit)
            if reason is None or room <= 0:
                break
            try:
                problem = replace(problem, memory_bytes=room)
            except PlanError:  # a module fits nowhere
                break
            tighter = PlannedMultiplexed.of(replace(inputs, problem=problem))
            if tighter.unfit:
                break
        return planned

    def plan(self, mapping: StageMapping, microbatches: int) -> Plan:
        """Return the plan of a mapping, with its costs and the limit of memory.

        Raises:
            NoPlanError: surfaces do not say what modules take on one whole device.
        """
        return replace(
            plan_of_mapping(self.inputs.parts, mapping, microbatches),
            profile=self.shared_profile(microbatches), memory_limit=self.inputs.memory_limit,
        )

    def shared_profile(self, microbatches: int) -> CostProfile:
        """Layer costs of one of so many microbatches of a step, with its surfaces.

        Raises:
            NoPlanError: surfaces do not say what pipelines take.
            PlanError: surfaces are of other lengths.
        """
        profile, workload = self.profile(), self.inputs.workload
        # Whether whole modules fit is no matter here.
        anyhow = replace(self.inputs.request, tokens={}, memory_gib=MOST_GIB)
        problem = self.mapping_inputs(anyhow, microbatches).problem
        surfaces = problem.surfaces
        if self.inputs.request.surfaces is not None:  # of a whole step
            surfaces = tuple(
                replace(surface, seconds=tuple(
                    tuple(seconds / microbatches for seconds in row) for row in surface.seconds
                ))
                for surface in surfaces
            )
        sharing = DeviceSharing(surfaces, problem.interference)
        many = workload.microbatches // microbatches
        layers = {}
        for shape, surface in zip(self.shapes, surfaces, strict=True):
            own = tuple(layer_of_samples(cost, many) for cost in profile.modules[shape.name])
            factor = surface.seconds_at(1, surface.steps) / shape.seconds(own)
            layers[shape.name] = slowed_layers(own, factor)
        tokens = {name: count * many for name, count in profile.tokens.items()}
        return replace(
            profile, modules={**profile.modules, **layers}, tokens=tokens, sharing=sharing
        )

    def profile(self) -> CostProfile:
        """Layer costs that pipelines are judged by.

        Raises:
            NoPlanError: surfaces do not say them.
            PlanError: surfaces are of other lengths.
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
                raise NoPlanError(
                    f"surfaces of {shape.name!r} lack one full device (degrees are "
                    f"{list(surface.degrees)}, quotas {list(surface.quotas)} of {surface.steps}), "
                    "which the layer costs of pipelines are scaled by"
                )
            alone = surface.seconds_at(1, surface.steps) / self.inputs.workload.microbatches
            factor = alone / shape.seconds(layers[shape.name])
            layers[shape.name] = slowed_layers(layers[shape.name], factor)
        return replace(costs.profile, modules=layers)
