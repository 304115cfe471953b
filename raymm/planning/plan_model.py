"""Planning a model: what raymm does when no layout is given, and ``raymm.plan``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from raymm.actors.probe.callbacks import Cuts, probe_chain
from raymm.actors.probe.cut import ProbeError, probe_language_model
from raymm.model.multimodal import LANGUAGE_MODEL, MultimodalModule, module_graph
from raymm.planning.degrees import DegreeRequest, Refused, refused_degrees
from raymm.planning.plan_result import PlanResult
from raymm.planning.plan_view import draw_schedule, explanation, plan_html, plan_table
from raymm.planning.planned_costs import Costs, model_costs
from raymm.planning.strategies import OMNIBAL_RADIUS, Search, find_plans, is_joint
from raymm.scheduler.costs.profile_table import ProfileTable
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.search.evaluation import Option
from raymm.scheduler.search.module_degrees import degrees_of
from raymm.scheduler.search.planner import LAYOUTS, SEARCHED_SCHEDULES
from raymm.scheduler.search.uncut_modules import in_own_layers, with_uncut_modules

NO_DEGREES = DegreeRequest({}, {})
class Planned(PlanResult):
    """A plan, what else was tried, and pictures and tables of it. Notebooks show the table."""

    def table(self) -> Table:
        """Every stage: its layers, its place, what it costs. For a rich console."""
        return plan_table(self)

    def explain(self) -> str:
        """How long a step takes, what was tried instead, and why it lost."""
        return explanation(self)

    def draw(self, path: str | Path) -> Path:
        """Draw the simulated step; ``.png`` or ``.svg``. Returns the path written."""
        return draw_schedule(self, path)

    def _repr_html_(self) -> str:
        return plan_html(self)


def plan_model(
    model: MultimodalModule, costs: Costs, search: Search, graph: ModuleGraph | None = None,
    degrees: DegreeRequest = NO_DEGREES,
) -> Planned:
    """Search for a plan. Modules that the probe cannot cut stay whole, and those whose tokens or
    parameters it cannot share out are not shared.

    Args:
        degrees: which degrees of parallelism within modules may be searched, where links are
            known.

    Raises:
        StageSearchError: if nothing fits.
        PlanError: if a degree is asked for that a module cannot have.
    """
    graph = graph or module_graph(model)
    search = replace(search, network=costs.network)
    notes = list(costs.notes)
    searches_degrees = bool(degrees) and is_joint(graph, search) and costs.device is not None
    if degrees and costs.device is None:
        notes.append("degrees are not searched: no device is named, so links are not known")
    whole: dict[str, str] = {}
    unshared: dict[Refused, str] = {}
    probed: set[str] = set()
    shared: set[Any] = set()
    while True:
        if searches_degrees:
            choices = degrees.choices(
                model, search.ranks, search.num_microbatches, costs.profile.tokens,
                frozenset(unshared),
            )
            search = replace(search, degrees=choices)
        found = find_plans(*with_uncut_modules(graph, costs.profile, whole), search)
        options = tuple(
            replace(option, plan=in_own_layers(option.plan, graph, costs.profile))
            for option in found.options
        )
        cut = {name for option in options for name in cut_modules(option.plan)} - probed
        probed |= cut
        refused = refused_cuts(model, sorted(cut))
        not_shared = _refused_shares(model, options, shared)
        if not refused and not not_shared:
            break
        whole |= refused
        unshared |= not_shared
    notes += [f"{name} stays in one piece: {reason}" for name, reason in whole.items()]
    notes += sorted({f"{name} without {kind}: {why}" for (name, kind, _), why in unshared.items()})
    return Planned(
        options[0].plan, replace(found, options=options), costs, search, notes=tuple(notes)
    )


def cut_modules(plan: Plan) -> list[str]:
    """Modules of which a plan cuts the blocks; a projector comes off any encoder."""
    return [
        node.name for node in plan.graph.nodes
        if plan.replicas(node.name)[0][0].layers[1] < node.num_blocks
    ]


def _refused_shares(
    model: MultimodalModule, options: Iterable[Option], probed: set[Any]
) -> dict[Refused, str]:
    """What the model's code does not allow of the options' degrees; ``probed`` are those that are
    known to be allowed, or have been found out."""
    refused: dict[Refused, str] = {}
    for option in options:
        key = tuple(degrees_of(option.plan, node.name)[1:3] for node in option.plan.graph.nodes)
        if key not in probed:
            probed.add(key)
            refused |= refused_degrees(model, option.plan)
    return refused


def refused_cuts(model: MultimodalModule, modules: Sequence[str]) -> dict[str, str]:
    """Those of the modules that the probe cannot cut, with its reason."""
    refused = {}
    for name in modules:
        try:
            if name == LANGUAGE_MODEL:
                probe_language_model(model.language_spec().source)
            else:
                encoder = model.encoders[name]
                cuts = Cuts(True, encoder.projector is not None)
                probe_chain(model.encoder_spec(name), cuts, encoder.example_inputs)
        except ProbeError as error:
            refused[name] = str(error)
    return refused


def plan(
    model: MultimodalModule,
    *,
    ranks: int,
    microbatches: int = 8,
    device: str | None = None,
    profile: ProfileTable | str | Path | None = None,
    microbatch: Mapping[str, Any] | None = None,
    tokens: Mapping[str, int] | None = None,
    samples: int = 1,
    dtype: str = "bf16",
    memory_gib: float | None = None,
    ranks_per_node: int = 8,
    strategy: str = "joint",
    schedules: Sequence[str] = SEARCHED_SCHEDULES,
    layouts: Sequence[str] = LAYOUTS,
    recompute: bool | str | None = None,
    radius: int = OMNIBAL_RADIUS,
    degrees: str | Sequence[str] = "auto",
) -> Planned:
    """Plan a model: cut its modules, place the stages, choose a schedule.

    Nothing is started and no weights are read::

        planned = raymm.plan(model, ranks=24, device="H100", tokens={"llm": 4096})
        planned                                # in a notebook: the table
        raymm.Trainer(model, planned.plan, ...)

    Args:
        model: the description.
        ranks: how many devices there are; a plan may use fewer.
        microbatches: per step.
        device, profile, microbatch, tokens, samples, dtype, ranks_per_node: what the layers
            cost, as of :func:`model_costs`.
        memory_gib: GiB a rank may use; by default 0.9 of the device's memory, on CPUs no limit.
        strategy, schedules, layouts, recompute, radius: what is searched, as of
            :class:`raymm.planning.strategies.Search`.
        degrees: of tensor, context and data parallelism, as of
            :meth:`raymm.planning.degrees.DegreeRequest.of`; ``"none"`` plans pipelines only.

    Raises:
        PlanError, DeviceError, ProfileError, LoadError: naming the argument and what is accepted.
        StageSearchError: if nothing fits.
    """
    request = DegreeRequest.of(degrees)
    request.check((*model.encoder_names, LANGUAGE_MODEL))
    costs = model_costs(
        model, device=device, profile=profile, microbatch=microbatch, tokens=tokens,
        samples=samples, dtype=dtype, ranks_per_node=ranks_per_node,
    )
    search = Search(
        ranks, microbatches, costs.memory_limit(memory_gib), strategy=strategy,
        schedules=tuple(schedules), layouts=tuple(layouts), recompute=recompute, radius=radius,
    )
    return plan_model(model, costs, search, degrees=request)
