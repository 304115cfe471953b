"""The search for a pipelined plan, ``raymm.plan``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raymm.actors.probe.callbacks import Cuts
from raymm.errors import NoPlanError, PlanError, ProbeError
from raymm.layout.plan_check import check_groups
from raymm.layout.stage_builders import stage_builders
from raymm.model.features import PIPELINED_PLANS
from raymm.model.model import Model
from raymm.planning.degrees import Refused, refused_degrees
from raymm.planning.inputs import PlanInputs
from raymm.planning.plan import Planned
from raymm.planning.request import PlanRequest, Workload
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.rank_nodes import straddling
from raymm.scheduler.progress.search_control import SearchControl
from raymm.scheduler.search.evaluation import Option, Proposal, step_bound
from raymm.scheduler.search.factor_search import search_factors, with_factor
from raymm.scheduler.search.module_degrees import degrees_of
from raymm.scheduler.search.planner import find_plans, has_rank_each
from raymm.scheduler.search.uncut_modules import in_own_layers, with_uncut_modules


def plan(
    model: Model,
    *,
    ranks: int,
    microbatches: int = 8,
    microbatch: Mapping[str, Any] | None = None,
    samples: int = 1,
    dtype: str = "bf16",
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Planned:
    """Plan a model: cut its modules, place the stages, and choose a schedule.

    No process is started and no weights are read. Ctrl-C ends a search with the best plan so far::

        planned = raymm.plan(model, ranks=24, device="H100", tokens={"llm": 4096})
        planned                                # in a notebook: the table
        raymm.Trainer(model, planned.plan, ...)

    Args:
        ranks: number of devices; a plan may use fewer.
        microbatches, microbatch, samples, dtype: see :class:`raymm.planning.request.Workload`.
        say: called with a progress line every few seconds of a long search, e.g. ``print``.
        **options: fields of :class:`raymm.PlanRequest`: ``device``, ``profile``, ``tokens``,
            ``memory_gib``, ``ranks_per_node``, ``time_limit``, ``degrees``, ``schedules``,
            ``layouts``, ``recompute``, ``passes``, ``per_batch``,
            ``dollars_per_gpu_hour``.

    Raises:
        TypeError: unknown option.
        ModelError: the model is a graph of modules, whose plans are given.
        PlanError: names the argument and what is accepted.
        NoPlanError: no plan fits.
    """
    model.require(PIPELINED_PLANS)
    request = PlanRequest.of_options({"ranks": ranks, **options})
    request.degree_request.check(model.module_names)
    workload = Workload(microbatches, samples, microbatch=microbatch, dtype=dtype)
    inputs = PlanInputs.of(model, request, workload)
    control = SearchControl(request.time_limit, say)
    with control.interruptible():
        return search_pipelines(inputs, control).finished(request)


def search_pipelines(inputs: PlanInputs, control: SearchControl | None = None) -> Planned:
    """Search for a pipelined plan. By default the request's time limit ends the search.

    Modules that the probe cannot cut stay on one stage, and modules whose tokens or parameters the
    probe cannot split are not split. The search is repeated until its options use no refused cut or
    degree.

    Raises:
        NoPlanError: no plan fits.
        PlanError: a requested degree is not possible for a module.
    """
    model, costs = inputs.model, inputs.costs
    control = control or SearchControl(inputs.request.time_limit)
    degrees, problem, notes = inputs.request.degree_request, inputs.problem(), list(costs.notes)
    searches_degrees = bool(degrees) and has_rank_each(problem)
    if degrees and costs.device is None:
        searches_degrees = False
        notes.append("degrees are not searched: no device is named, so link speeds are unknown")
    uncut: dict[str, str] = {}
    unshared: dict[Refused, str] = {}
    probed: set[str] = set()
    shared: set[Any] = set()
    while True:
        if searches_degrees:
            choices = degrees.choices(
                model, inputs.ranks, inputs.workload.microbatches, costs.profile.tokens,
                frozenset(unshared),
            )
            problem = replace(problem, degrees=choices)
        control.begin()
        try:
            graph, profile = with_uncut_modules(problem.graph, problem.profile, set(uncut))
            proposal = find_plans(replace(problem, graph=graph, profile=profile), control=control)
            proposal = replace(proposal, options=tuple(
                replace(option, plan=in_own_layers(option.plan, problem.graph, problem.profile))
                for option in proposal.options
            ))
        except NoPlanError as error:
            limit = costs.memory_limit(inputs.request.memory_gib)
            raise NoPlanError(f"{error}{_advice(model) if limit else ''}") from None
        if control.stopped is not None:  # the probes of further plans take seconds
            proposal = replace(proposal, options=proposal.options[:1])
        cut = {name for option in proposal.options for name in cut_modules(option.plan)} - probed
        probed |= cut
        refused = refused_cuts(model, sorted(cut))
        not_shared = _refused_shares(model, proposal.options, shared)
        if not refused and not not_shared:
            break
        uncut |= refused
        unshared |= not_shared
    if control.stopped is not None:
        notes.append(f"the search was stopped by {control.stopped}: this is the best plan so far")
    proposal = _with_factors(inputs, proposal, control)
    best = proposal.best.plan
    nodes = [process // costs.ranks_per_node for process in range(best.num_processes)]
    if costs.device is not None and (astride := straddling(best, nodes)) is not None:
        notes.append(astride)
    notes += [f"{name} is not cut into stages: {reason}" for name, reason in uncut.items()]
    notes += sorted({f"{name} without {kind}: {why}" for (name, kind, _), why in unshared.items()})
    return Planned(
        best, proposal, costs, replace(problem, degrees={}), tuple(uncut),
        notes=tuple(notes),
    )


def _with_factors(inputs: PlanInputs, proposal: Proposal, control: SearchControl) -> Proposal:
    """Return the proposal with the best plan's fastest factors of encoders, if forwards that
    several microbatches share make it faster."""
    best, network = proposal.best, inputs.costs.network
    if inputs.request.keeps_features:
        return proposal
    modules = [
        name for name in inputs.costs.profile.fixed
        if _shares_forwards(inputs.model, best.plan, name)
    ]
    option = search_factors(best, network, modules, control)
    if option is best:
        return proposal
    bound = step_bound(option.plan, network)
    return replace(proposal, options=(option, *proposal.options), bound=bound)


def _shares_forwards(model: Model, plan: Plan, module: str) -> bool:
    """Return True if a run of the plan accepts a ``microbatch_factor`` of a module."""
    try:
        shared = with_factor(plan, module, 2)
        check_groups(model, shared)
        stage_builders(model, shared)
    except (PlanError, ProbeError):
        return False
    return True


def _advice(model: Model) -> str:
    """Return advice on saving memory if the language model is fully trained, otherwise an empty
    string."""
    if model.adapts_language or not any(model.graph.node(model.text_module).trainable):
        return ""
    return (
        ". The language model is trained in full, which takes 16 bytes per parameter with AdamW; "
        "adapters take a fraction of that: raymm train --lora, or "
        f"{model.language_field}: {{lora: {{r: 16}}}}"
    )


def cut_modules(plan: Plan) -> list[str]:
    """Return the modules whose blocks a plan cuts; a separate stage for a projector does not
    count."""
    return [
        node.name for node in plan.graph.nodes
        if plan.replicas(node.name)[0][0].layers[1] < node.num_blocks
    ]


def _refused_shares(
    model: Model, options: Iterable[Option], probed: set[Any]
) -> dict[Refused, str]:
    """Return the degrees of the options that the model's code does not support, and add to
    ``probed``."""
    refused: dict[Refused, str] = {}
    for option in options:
        key = tuple(degrees_of(option.plan, node.name)[1:3] for node in option.plan.graph.nodes)
        if key not in probed:
            probed.add(key)
            refused |= refused_degrees(model, option.plan)
    return refused


def refused_cuts(model: Model, modules: Sequence[str]) -> dict[str, str]:
    """Return the modules that the probe cannot cut, with the reason."""
    refused = {}
    for name in modules:
        try:
            model.module(name).cut(Cuts(True, model.graph.node(name).projector))
        except ProbeError as error:
            refused[name] = str(error)
    return refused
