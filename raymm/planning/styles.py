"""Comparison of execution styles for one model: pipelined, multiplexed, or a plan between them."""

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
from raymm.plural import plural
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

# Number of attempts to find a mapping that fits by the memory model of all plans.
TIGHTENED = 4


@dataclass(frozen=True)
class StyleComparison:
    """A pipelined plan and a multiplexed mapping of the same model, batch and devices.

    Attributes:
        pipelined, multiplexed: None where the style was refused, with the reason in ``refused``.
        batch, microbatches: samples of a step, and microbatches of the pipelined plan.
        between: the search that continues from both styles; None if nothing fits, or if the
            surfaces do not cover what pipelines need.
    """

    pipelined: Planned | None
    multiplexed: PlannedMultiplexed | None
    refused: Mapping[str, str]
    batch: int
    microbatches: int
    between: StyleSearch | None = None

    @property
    def chosen(self) -> Plan | None:
        """The plan to run: the fastest of both styles and the plans between them, evaluated
        equally. If no plans between them were searched, the pipelined plan, or None if the other
        style is faster."""
        if self.between is not None:
            return self.between.best.plan
        return self.pipelined.plan if self.pipelined and self.style == PIPELINED else None

    @property
    def style(self) -> str | None:
        """The faster of the styles that fit; None if neither fits."""
        seconds = self.seconds
        return min(seconds, key=lambda style: seconds[style]) if seconds else None

    @property
    def seconds(self) -> dict[str, float]:
        """Predicted seconds of a step, for each style that fits."""
        planned = {PIPELINED: self.pipelined, MULTIPLEXED: self.multiplexed}
        return {
            style: plan.seconds for style, plan in planned.items()
            if plan is not None and style not in self.refused
        }

    def explain(self) -> str:
        """Return a text on which style is faster, by how much, and what the two numbers include."""
        lines = [f"{style} does not run: {reason}" for style, reason in self.refused.items()]
        by_style = self.seconds
        best = self.style
        if best is not None and len(by_style) == 2:
            slower = next(s for s in by_style if s != best)
            lines.append(
                f"{best} is predicted to be {by_style[slower] / by_style[best]:.2f} times as fast: "
                f"{time_text(by_style[best])} against {time_text(by_style[slower])} per step of "
                f"{plural(self.batch, 'sample')}"
            )
        elif best is not None:
            seconds = time_text(by_style[best])
            lines.append(f"{best} runs: {seconds} per step of {plural(self.batch, 'sample')}")
        return "\n".join([*lines, *self._between_lines(), *self.common_lines])

    @property
    def common_lines(self) -> list[str]:
        """Lines on what the predictions of the two styles have in common, and what not."""
        return [
            "the same for both: batch, devices, memory limit, frozen rules, the costs of layers "
            "(modules too small to fill a device are slower by the same rule)",
            f"pipelined: {plural(self.microbatches, 'microbatch', 'es')} through cut modules; "
            "bubbles and "
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
        method = (
            "all layouts without guests, then local moves" if search.exhaustive else "local moves"
        )
        return [
            f"{text}, {time_text(best.seconds)} per step (all simulated, with messages, "
            f"interference and memory: {starts or 'neither style fits'}; {method}, {search.tried} "
            "plans tried)",
            *search.lines(),
        ]


def compare_styles(
    inputs: PlanInputs, plan: Plan | None = None, at_once: bool = True,
    control: SearchControl | None = None,
) -> StyleComparison:
    """Plan a model in both styles with the same costs, and search for plans between them.

    Args:
        inputs: if surfaces are given, layer costs are scaled so that a module takes the time of its
            surface on one full device.
        plan: a pipelined plan to compare with instead of searching for one. It must have the
            requested number of ranks (:func:`with_ranks_of`) and microbatches.
        at_once: True if the samples of a step may form one microbatch; otherwise a mapping runs one
            of the requested microbatches at a time.
        control: for the search between the styles; by default the request's time limit ends it.

    Raises:
        PlanError: names what is wrong. A style that does not fit is recorded in ``refused``
            instead.
    """
    workload = inputs.workload
    if plan is not None and plan.num_microbatches != workload.microbatches:
        raise PlanError(
            f"microbatches is {workload.microbatches}; the given plan has {plan.num_microbatches}"
        )
    refused: dict[str, str] = {}
    basis = _Basis.of(inputs)
    try:
        # Lengths also apply to pipelines; those of the surfaces are checked below.
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
    """Return the best plan of each style that fits, evaluated equally."""
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
    """Search between the styles, and repeat while the best plan cuts modules that the probe cannot
    cut."""
    uncut = set() if pipelined is None else set(pipelined.whole)
    sharing = next(iter(profiles.values())).sharing
    quotas = sharing is not None and any(
        surface.quotas[0] < surface.steps for surface in sharing.surfaces
    )
    while True:
        problem = StyleProblem(
            inputs.graph, profiles, inputs.ranks, inputs.memory_limit, inputs.costs.network,
            inputs.request.quota_steps if quotas else 1, frozenset(uncut),
            tuple(inputs.request.schedules),
        )
        try:
            result = search_between(problem, starts, control)
        except PlanError:
            return None
        cut = cut_modules(result.best.plan) if result.best.layout == BETWEEN else []
        refused = refused_cuts(inputs.model, sorted(set(cut) - uncut))
        if not refused:
            return result
        uncut |= set(refused)


def with_ranks_of(plan: Plan, request: PlanRequest) -> PlanRequest:
    """Return the request with the plan's number of ranks, so that both styles use the same devices.
    Raises PlanError if the request has another number."""
    if request.ranks not in (None, plan.num_ranks):
        raise PlanError(
            f"ranks is {request.ranks}, but the given plan (parallel) is for {plan.num_ranks}; "
            f"accepted: {plan.num_ranks}, or none"
        )
    return replace(request, ranks=plan.num_ranks)


def plan_step_multiplexed(inputs: PlanInputs) -> PlannedMultiplexed:
    """Return the multiplexed mapping of :func:`compare_styles`, for all samples of a step at once.
    Raises NoPlanError if a module fits on no GPU, and PlanError for invalid inputs."""
    return _Basis.of(inputs).multiplexed(inputs.request)


def step_plan(inputs: PlanInputs, planned: PlannedMultiplexed) -> Plan:
    """Return the plan that runs a mapping of :func:`plan_step_multiplexed`, with its costs and
    surfaces where these cover a full device."""
    with suppress(NoPlanError):
        return _Basis.of(inputs).plan(planned.mapping, 1)
    return plan_of_mapping(inputs.parts, planned.mapping)


@dataclass(frozen=True)
class _Basis:
    """Costs and loads that both styles are evaluated with."""

    inputs: PlanInputs
    shapes: tuple[ModuleShape, ...]
    loads: Mapping[str, Load]  # load of a microbatch
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
        """Return the inputs of a mapping of a step's samples, in sequential microbatches."""
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
                loads[inputs.model.text_module].samples, dtype, dtype, loads, measured, microbatches
            ),
            inputs.costs.device or find_device(CPU) if named else None,
            () if has_surfaces else self.notes,
        )

    def multiplexed(self, request: PlanRequest, microbatches: int = 1) -> PlannedMultiplexed:
        """Map a step's samples so that the plan fits by the same memory model as pipelines.

        Surfaces include neither messages nor system memory and optimizer updates. If the plan does
        not fit with these, the search is repeated with a lower memory limit.
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
                return planned  # only the surfaces' own memory is known
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
            except PlanError:  # a module fits on no GPU
                break
            tighter = PlannedMultiplexed.of(replace(inputs, problem=problem))
            if tighter.unfit:
                break
        return planned

    def plan(self, mapping: StageMapping, microbatches: int) -> Plan:
        """Return the plan of a mapping, with its costs and the memory limit."""
        return replace(
            plan_of_mapping(self.inputs.parts, mapping, microbatches),
            profile=self.shared_profile(microbatches), memory_limit=self.inputs.memory_limit,
        )

    def shared_profile(self, microbatches: int) -> CostProfile:
        """Return layer costs of a microbatch if a step has ``microbatches`` of them, with the
        surfaces."""
        profile, workload = self.profile(), self.inputs.workload
        # Memory does not matter here: only the surfaces of the problem are used.
        unlimited = replace(self.inputs.request, tokens={}, memory_gib=MOST_GIB)
        problem = self.mapping_inputs(unlimited, microbatches).problem
        surfaces = problem.surfaces
        if self.inputs.request.surfaces is not None:  # measured on a whole step
            surfaces = tuple(
                replace(surface, seconds=tuple(
                    tuple(seconds / microbatches for seconds in row) for row in surface.seconds
                ))
                for surface in surfaces
            )
        sharing = DeviceSharing(surfaces, problem.interference)
        merged = workload.microbatches // microbatches
        layers = {}
        for shape, surface in zip(self.shapes, surfaces, strict=True):
            slowed = tuple(layer_of_samples(cost, merged) for cost in profile.modules[shape.name])
            factor = surface.seconds_at(1, surface.steps) / shape.seconds(slowed)
            layers[shape.name] = slowed_layers(slowed, factor)
        tokens = {name: count * merged for name, count in profile.tokens.items()}
        return replace(
            profile, modules={**profile.modules, **layers}, tokens=tokens, sharing=sharing
        )

    def profile(self) -> CostProfile:
        """Return the layer costs that pipelines are evaluated with."""
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
            alone_seconds = surface.seconds_at(1, surface.steps) / self.inputs.workload.microbatches
            factor = alone_seconds / shape.seconds(layers[shape.name])
            layers[shape.name] = slowed_layers(layers[shape.name], factor)
        return replace(costs.profile, modules=layers)
