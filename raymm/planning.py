"""Planning a model: what raymm does when no layout is given, and ``raymm.plan``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from raymm.actors.stages.probe import ProbeError, probe_language_model
from raymm.actors.stages.probe_callbacks import Cuts, probe_chain
from raymm.analytic import analytic_profile
from raymm.degrees import DegreeRequest, Refused, refused_degrees
from raymm.loads import Loads, changed_tokens, check_tokens, loads_of_microbatch, loads_of_tokens
from raymm.model import LANGUAGE_MODEL, MultimodalModule, module_graph
from raymm.named_devices import CPU, device_called
from raymm.profile_files import load_table
from raymm.scheduler.costs import CostProfile, ProfileError
from raymm.scheduler.devices import DeviceSpec, find_device
from raymm.scheduler.graph import ModuleGraph
from raymm.scheduler.judge import Option, Proposal, judge, step_bound, step_timeline
from raymm.scheduler.lower import full_program
from raymm.scheduler.memory import GIB
from raymm.scheduler.module_degrees import degrees_of
from raymm.scheduler.network import Network
from raymm.scheduler.plan import Plan, PlanError
from raymm.scheduler.planner import LAYOUTS, SEARCHED_SCHEDULES
from raymm.scheduler.profile_table import ProfileTable
from raymm.scheduler.program import Program
from raymm.scheduler.timeline import Timeline
from raymm.scheduler.whole_modules import in_own_layers, with_whole_modules
from raymm.strategies import OMNIBAL_RADIUS, Search, find_plans, is_joint

# Share of a device's memory that a plan may use; the rest is for CUDA, NCCL and fragmentation.
MEMORY_SHARE = 0.9
NO_DEGREES = DegreeRequest({}, {})
@dataclass(frozen=True)
class Costs:
    """What a plan is judged by.

    Attributes:
        profile: costs of every layer on one microbatch, with the device's links.
        device: where; None if measured on one that raymm has no data of.
        ranks_per_node: processes that share a node.
        notes: remarks a person should see.
    """

    profile: CostProfile
    device: DeviceSpec | None = None
    ranks_per_node: int = 8
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.device is not None and self.profile.links is None:
            profile = replace(self.profile, links=self.network.links)
            object.__setattr__(self, "profile", profile)

    @property
    def network(self) -> Network:
        """The device's links; messages take no time if it is not known."""
        if self.device is None:
            return Network()
        return Network(self.device.within_node, self.device.across_nodes, self.ranks_per_node)

    def memory_limit(self, gib: float | None) -> int | None:
        """Bytes a rank may use: as said, else most of a known device's memory; none on CPUs."""
        if gib is not None:
            if not gib > 0:
                raise PlanError(f"memory_gib is {gib}; it must be above 0")
            return int(gib * GIB)
        if self.device is None or self.device.name == CPU:
            return None
        return int(MEMORY_SHARE * self.device.memory_bytes)


def model_costs(
    model: MultimodalModule,
    *,
    device: str | None = None,
    profile: ProfileTable | str | Path | None = None,
    microbatch: Callable[[], Mapping[str, Any]] | Mapping[str, Any] | None = None,
    tokens: Mapping[str, int] | None = None,
    samples: int = 1,
    text: int | None = None,
    dtype: str = "fp32",
    ranks_per_node: int = 8,
) -> Costs:
    """Costs of a model's layers: measured ones of a profile, else analytic ones of a device.

    Args:
        model: the description; its weights are not used.
        device: a name that :func:`raymm.scheduler.devices.find_device` knows; by default the
            profile's, else ``"cpu"``.
        profile: a table that ``raymm profile`` made, or its file.
        microbatch: a real one (or a function that reads one) to take lengths from.
        tokens: per module, tokens per sample; where given, instead of the microbatch's.
        samples, text: samples per microbatch and their longest text, if there is no
            ``microbatch``.
        dtype: compute dtype, ``"fp32"`` or ``"bf16"``.
        ranks_per_node: ranks that share a node.

    Raises:
        DeviceError, ProfileError, LoadError: naming the field and what is accepted.
    """
    if ranks_per_node < 1:
        raise PlanError(f"ranks_per_node is {ranks_per_node}; it must be at least 1")
    tokens = dict(tokens or {})
    check_tokens(model, tokens)
    spec = None if device is None else find_device(device)
    if profile is not None:
        table = profile if isinstance(profile, ProfileTable) else load_table(profile)
        totals = {name: _total(table, name, each) for name, each in tokens.items()}
        found = table.at(totals)
        return Costs(found, spec or device_called(table.device), ranks_per_node)
    loads = _loads(model, microbatch, tokens, samples, text)
    notes = loads.notes
    if spec is None:
        spec = find_device(CPU)
        notes += ("no device is named: costs are those of one CPU core",)
    return Costs(
        analytic_profile(model, loads.by_module, spec, dtype), spec, ranks_per_node, notes
    )


def _loads(
    model: MultimodalModule, microbatch: Any, tokens: Mapping[str, int], samples: int,
    text: int | None,
) -> Loads:
    if microbatch is None or set(tokens) >= {*model.encoder_names, LANGUAGE_MODEL}:
        return loads_of_tokens(model, tokens, samples, text)
    real = microbatch() if callable(microbatch) else microbatch
    return changed_tokens(loads_of_microbatch(model, real), tokens)


def _total(table: ProfileTable, name: str, each: int) -> int:
    """Tokens of a microbatch from tokens per sample, with as many samples as the default
    microbatch has."""
    if name not in table.modules:
        raise ProfileError(
            f"tokens name {name!r}; the profile's modules are {', '.join(table.modules)}"
        )
    default = table.default[name]
    row = next((r for r in table.modules[name] if r.tokens == default), table.modules[name][0])
    return each * row.samples


@dataclass(frozen=True)
class Planned:
    """A plan, what else was tried, and pictures and tables of it. Notebooks show the table.

    Attributes:
        plan: what to run.
        proposal: everything that was judged; a plan that was given is the only option.
        costs: what it was judged by.
        search: what was searched for; None if the plan was given.
        unfit: why the plan does not fit in memory, if it does not.
        notes: remarks a person should see.
    """

    plan: Plan
    proposal: Proposal
    costs: Costs
    search: Search | None = None
    unfit: str | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def network(self) -> Network:
        """The links it was judged with."""
        return self.costs.network

    @cached_property
    def program(self) -> Program:
        """The program of a step in which every microbatch has every modality."""
        return full_program(self.plan)

    @cached_property
    def timeline(self) -> Timeline:
        """That step, simulated."""
        return step_timeline(self.plan, self.network, self.program)

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.makespan

    def table(self) -> Table:
        """Every stage: its layers, its place, what it costs. For a rich console."""
        from raymm.plan_view import plan_table

        return plan_table(self)

    def explain(self) -> str:
        """How long a step takes, what was tried instead, and why it lost."""
        from raymm.plan_view import explanation

        return explanation(self)

    def draw(self, path: str | Path) -> Path:
        """Draw the simulated step; ``.png`` or ``.svg``. Returns the path written."""
        from raymm.plan_view import draw_schedule

        return draw_schedule(self, path)

    def _repr_html_(self) -> str:
        from raymm.plan_view import plan_html

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
        found = find_plans(*with_whole_modules(graph, costs.profile, whole), search)
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


def judge_plan(plan: Plan, costs: Costs, memory_limit: int | None = None) -> Planned:
    """A plan that was given, with costs: what raymm expects of it.

    Args:
        plan: the plan; its own profile and limit, where it has them, go first.
        costs: of its model.
        memory_limit: bytes a rank may use.
    """
    costs = replace(costs, profile=plan.profile or costs.profile)
    plan = replace(
        plan, profile=costs.profile,
        memory_limit=memory_limit if plan.memory_limit is None else plan.memory_limit,
    )
    option, unfit = judge(plan, costs.network, "given")
    bound = step_bound(option.plan, costs.network)
    return Planned(
        option.plan, Proposal((option,), (), bound, 0, 1), costs, unfit=unfit, notes=costs.notes
    )


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
            :class:`raymm.strategies.Search`.
        degrees: of tensor, context and data parallelism, as of
            :meth:`raymm.degrees.DegreeRequest.of`; ``"none"`` plans pipelines only.

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
