"""Planners to choose from: raymm's own search, and simpler ones to compare it with.

- ``joint``: :func:`raymm.scheduler.search.planner.propose`, exact over stage counts, with the
better
  schedules, chunks and layouts, and degrees of parallelism within modules;
- ``loosely_coupled``: Cornstarch v1's Algorithm 1;
- ``unaware``: the joint search of stage counts, but stages balanced as if every layer were
  trained;
- ``layers``, ``parameters``: the same with stages of equally many layers or parameters;
- ``omnibal``: around the joint search's stage counts, OmniBal's partition candidates (§4.2), the
  best of which are meant to be really run.

All but ``joint`` have one rank per stage; what they find is judged like its plans.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from raymm.scheduler.costs.layer_costs import CostProfile, LayerWork, layer_work, unaware_work
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.plan import SCHEDULES, Plan, PlanError
from raymm.scheduler.plan.plan_error import check_choices, check_number
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.search.evaluation import Candidates, Option, Proposal, fastest_first
from raymm.scheduler.search.module_degrees import DegreeChoices
from raymm.scheduler.search.omnibal_partition import PartitionCandidate, partition_candidates
from raymm.scheduler.search.partition import PartitionError, Ranges
from raymm.scheduler.search.planner import LAYERS, LAYOUTS, RECOMPUTE, SEARCHED_SCHEDULES, propose
from raymm.scheduler.search.stage_search import joint_search, loosely_coupled
from raymm.scheduler.search.stage_space import StageSearchError, StageSpace
from raymm.scheduler.search.time_shared_plans import time_shared_plans

STRATEGIES = ("joint", "loosely_coupled", "unaware", "layers", "parameters", "omnibal")
OMNIBAL_RADIUS = 1
OMNIBAL_TOP = 8
# A plan that fills this share of a rank's memory may owe its cuts to it.
TIGHT = 0.8


@dataclass(frozen=True)
class Search:
    """What is searched for, and how.

    Attributes:
        ranks: how many there are, of one device each.
        num_microbatches: microbatches per step.
        memory_limit: bytes per device, or None.
        network: what messages take.
        strategy: of :data:`STRATEGIES`.
        schedules: ``"1f1b"``, ``"zero_bubble"``, ``"gpipe"``: those that are tried.
        layouts: of :data:`raymm.scheduler.search.planner.LAYOUTS`; for ``joint``.
        recompute: whether stages recompute; ``"layers"``: layers keep as much as there is room
            for (``joint`` only); None: only if memory gets in the way.
        radius: how many layers OmniBal's search moves a cut.
        degrees: per module, the degrees it may have beside its pipeline; for ``joint``.

    Raises:
        PlanError: naming the field, its value and what is accepted.
    """

    ranks: int
    num_microbatches: int
    memory_limit: int | None = None
    network: Network = Network()
    strategy: str = "joint"
    schedules: Sequence[str] = SEARCHED_SCHEDULES
    layouts: Sequence[str] = LAYOUTS
    recompute: bool | str | None = None
    radius: int = OMNIBAL_RADIUS
    degrees: Mapping[str, DegreeChoices] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_number("ranks", self.ranks)
        check_number("microbatches", self.num_microbatches)
        if self.memory_limit is not None:
            check_number("memory_limit", self.memory_limit)
        if self.strategy not in STRATEGIES:
            raise PlanError(f"strategy is {self.strategy!r}; accepted: {', '.join(STRATEGIES)}")
        if self.recompute not in (None, *RECOMPUTE):
            raise PlanError(
                f"recompute is {self.recompute!r}; accepted: true, false, {LAYERS!r} or nothing"
            )
        check_choices("schedules", self.schedules, SCHEDULES)
        check_choices("layouts", self.layouts, LAYOUTS)
        check_number("radius", self.radius, least=0)


def find_plans(graph: ModuleGraph, profile: CostProfile, search: Search) -> Proposal:
    """Plan a model by a strategy.

    If it is open whether stages recompute, plans that do are searched as well once memory gets
    in the way of others.

    Raises:
        StageSearchError: if nothing fits.
    """
    try:
        found = _find(graph, profile, search)
    except StageSearchError:
        if search.recompute is not None or is_joint(graph, search):
            raise
        return _find(graph, profile, replace(search, recompute=True))
    # Of plans without degrees too, so that degrees never keep a better plan from being found.
    candidates = [found.best, *itertools.islice(filter(_is_pipelines, found.options), 1)]
    if search.recompute is None and any(_is_tight(o, search.memory_limit) for o in candidates):
        for again in (LAYERS, True):
            with suppress(StageSearchError):
                found = _merged(found, _find(graph, profile, replace(search, recompute=again)))
    return found


def is_joint(graph: ModuleGraph, search: Search) -> bool:
    """Whether the planner searches, which asks for a rank per module."""
    return search.strategy == "joint" and search.ranks >= len(graph.nodes)


def _is_tight(option: Option, limit: int | None) -> bool:
    if limit is None or any(stage.recompute for stage in option.plan.stages):
        return False
    return max(need.total for need in option.memory) > TIGHT * limit


def _is_pipelines(option: Option) -> bool:
    """Whether a plan could be found without degrees."""
    plan = option.plan
    copies = any(stage.replica for stage in plan.stages)
    return plan.num_processes == plan.num_ranks and not (
        copies and option.layout == "modality_parallel"
    )


def _merged(one: Proposal, other: Proposal) -> Proposal:
    options = fastest_first((*one.options, *other.options))
    return Proposal(
        options, tuple(dict.fromkeys((*one.refused, *other.refused))),
        one.bound if options[0] is one.best else other.bound,
        one.combinations + other.combinations, one.simulated + other.simulated,
    )


def _find(graph: ModuleGraph, profile: CostProfile, search: Search) -> Proposal:
    if is_joint(graph, search):
        return propose(
            graph, profile, search.ranks, search.num_microbatches,
            memory_limit=search.memory_limit, network=search.network,
            recompute=search.recompute, schedules=search.schedules, layouts=search.layouts,
            degrees=search.degrees,
        )
    space = StageSpace(
        graph, profile, max(search.ranks, len(graph.nodes)), search.num_microbatches,
        recompute=search.recompute is True, memory_limit=search.memory_limit,
    )
    found = Candidates(search.network, search.schedules)
    for label, plan in _candidates(space, search, found):
        found.add_schedules(label, plan)
    return found.proposal()


def _candidates(
    space: StageSpace, search: Search, evaluate: Candidates
) -> Iterator[tuple[str, Plan]]:
    """(name, plan) of what a strategy would run."""
    if search.ranks < len(space.graph.nodes):
        if search.strategy != "joint":
            raise StageSearchError(
                f"ranks is {search.ranks}; strategy {search.strategy!r} needs one for each of "
                f"{len(space.graph.nodes)} modules"
            )
        yield from time_shared_plans(space, search.ranks)
        return
    if search.strategy == "loosely_coupled":
        found = loosely_coupled(space, evaluate.seconds, evaluate.fits)
    else:
        space = replace(space, believed=_believed(space, search.strategy))
        # Bounds of the profile hold for any partition, so the search stays exact.
        found = joint_search(space, evaluate.seconds, evaluate.bound, evaluate.fits)
    evaluate.count(found)
    if search.strategy == "omnibal":
        plans = _omnibal(space, found.best.plan, search.radius)
    else:
        plans = (choice.plan for choice in (found.best, *found.alternatives))
    yield from ((search.strategy, plan) for plan in plans)


def _believed(space: StageSpace, strategy: str) -> dict[str, tuple[LayerWork, ...]] | None:
    """What stages are balanced by, where it is not what the layers really cost."""
    if strategy == "unaware":
        return unaware_work(space.graph, space.profile)
    if strategy == "layers":
        return {m: (_weight(1.0),) * len(c) for m, c in space.profile.modules.items()}
    if strategy == "parameters":
        return {
            m: tuple(_weight(float(cost.parameter_bytes)) for cost in costs)
            for m, costs in space.profile.modules.items()
        }
    return None


def _weight(amount: float) -> LayerWork:
    return LayerWork(amount, 0.0, 0.0, 0.0)


def _omnibal(space: StageSpace, best: Plan, radius: int) -> Iterator[Plan]:
    """Plans of the best combinations of every module's candidates. OmniBal ranks by the
    variance of forward times; here by that of 1F + 1B, of which a frozen module has no B."""
    per_module: dict[str, tuple[PartitionCandidate, ...]] = {}
    work = layer_work(space.graph, space.profile, space.recompute)
    for node in space.graph.nodes:
        anchor: Ranges = tuple(stage.layers for stage in best.module_stages(node.name))
        try:
            per_module[node.name] = partition_candidates(
                [one.total for one in work[node.name]],
                [cost.output_bytes for cost in space.profile.modules[node.name]],
                len(anchor), radius, anchor, OMNIBAL_TOP,
            )
        except PartitionError as error:
            raise StageSearchError(f"module {node.name!r}: {error}") from None
    combined = heapq.nsmallest(
        OMNIBAL_TOP, itertools.product(*per_module.values()),
        key=lambda chosen: sum(candidate.score for candidate in chosen),
    )
    for chosen in combined:
        yield space.made_of(
            {name: one.ranges for name, one in zip(per_module, chosen, strict=True)}
        )
