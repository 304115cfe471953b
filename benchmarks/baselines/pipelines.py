"""Pipeline planners that raymm's planner is compared with.

All have one rank per stage, and their plans are evaluated like raymm's.

- ``loosely_coupled``: Cornstarch v1's Algorithm 1;
- ``unaware``: the joint search of stage counts, but stages balanced as if every layer were trained;
- ``layers``, ``parameters``: the same with stages of equal numbers of layers or parameters;
- ``omnibal``: OmniBal's partition candidates (§4.2) for the joint search's stage counts; the best
  ones are meant to be measured in real runs.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from benchmarks.baselines.baseline import Baseline
from benchmarks.baselines.loosely_coupled import loosely_coupled
from benchmarks.baselines.omnibal_partition import PartitionCandidate, partition_candidates
from raymm.errors import NoPlanError
from raymm.scheduler.costs.layer_costs import CostProfile, LayerWork, layer_work
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.search.evaluation import Candidates, Proposal
from raymm.scheduler.search.options import PlanProblem
from raymm.scheduler.search.partition import Ranges
from raymm.scheduler.search.planner import find_plans, has_rank_each, space_of
from raymm.scheduler.search.stage_search import SearchResult, joint_search
from raymm.scheduler.search.stage_space import StageSpace

OMNIBAL_TOP = 8
# Largest distance that OmniBal's search moves a cut, in layers.
OMNIBAL_RADIUS = 1
Work = Mapping[str, tuple[LayerWork, ...]]
Search = Callable[[StageSpace, Candidates], SearchResult]


def unaware_work(graph: ModuleGraph, profile: CostProfile) -> dict[str, tuple[LayerWork, ...]]:
    """Return the work if all layers were trained, for a planner that ignores frozen layers."""
    profile.check(graph)
    return {
        name: tuple(
            LayerWork(c.forward, 0.0, c.backward_input, c.backward_weight)
            for c in profile.modules[name]
        )
        for name in (node.name for node in graph.nodes)
    }


def _layers(graph: ModuleGraph, profile: CostProfile) -> Work:
    return {m: (_weight(1.0),) * len(c) for m, c in profile.modules.items()}


def _parameters(graph: ModuleGraph, profile: CostProfile) -> Work:
    return {
        m: tuple(_weight(float(cost.parameter_bytes)) for cost in costs)
        for m, costs in profile.modules.items()
    }


def _weight(amount: float) -> LayerWork:
    return LayerWork(amount, 0.0, 0.0, 0.0)


def _joint(space: StageSpace, candidates: Candidates) -> SearchResult:
    return joint_search(space, candidates.seconds, candidates.bound, candidates.fits)


def _expecting(
    work: Callable[[ModuleGraph, CostProfile], Work], space: StageSpace, candidates: Candidates
) -> SearchResult:
    """Run the joint search of a planner that balances stages by this work.

    Bounds of the profile hold for any partition, so the search stays exact.
    """
    return _joint(replace(space, expected=work(space.graph, space.profile)), candidates)


def _loosely_coupled(space: StageSpace, candidates: Candidates) -> SearchResult:
    return loosely_coupled(space, candidates.seconds, candidates.fits)


def _propose(name: str, search: Search, problem: PlanProblem) -> Proposal:
    """Propose a plan with one of the searches.

    Raises:
        NoPlanError: nothing fits, or there are fewer ranks than modules.
    """
    space = space_of(problem)
    if not has_rank_each(problem):
        raise NoPlanError(
            f"ranks is {problem.ranks}; planner {name!r} needs one for each of "
            f"{len(problem.graph.nodes)} modules"
        )
    tried = Candidates(problem.network, problem.schedules)
    result = search(space, tried)
    tried.count(result)
    plans: Iterator[Plan] = (choice.plan for choice in (result.best, *result.alternatives))
    if name == "omnibal":
        plans = _omnibal(space, result.best.plan)
    for plan in plans:
        tried.add_schedules(name, plan)
    return tried.proposal()


def _omnibal(space: StageSpace, best: Plan) -> Iterator[Plan]:
    """Yield plans of the best combinations of every module's candidates.

    OmniBal ranks by the variance of forward times; here the variance is of 1F + 1B, where a frozen
    module has no B.
    """
    per_module: dict[str, tuple[PartitionCandidate, ...]] = {}
    work = layer_work(space.graph, space.profile, space.recompute)
    for node in space.graph.nodes:
        origin: Ranges = tuple(stage.layers for stage in best.module_stages(node.name))
        try:
            per_module[node.name] = partition_candidates(
                [layer.total for layer in work[node.name]],
                [cost.output_bytes for cost in space.profile.modules[node.name]],
                len(origin), OMNIBAL_RADIUS, origin, OMNIBAL_TOP,
            )
        except NoPlanError as error:
            raise NoPlanError(f"module {node.name!r}: {error}") from None
    combined = heapq.nsmallest(
        OMNIBAL_TOP, itertools.product(*per_module.values()),
        key=lambda chosen: sum(candidate.score for candidate in chosen),
    )
    for chosen in combined:
        yield space.made_of({
            name: candidate.ranges for name, candidate in zip(per_module, chosen, strict=True)
        })


def _baseline(name: str, source: str, search: Search) -> Baseline[PlanProblem, Proposal]:
    planner = partial(_propose, name, search)
    return Baseline(name, source, lambda problem: find_plans(problem, planner))


PIPELINES = (
    _baseline("loosely_coupled", "Cornstarch v1, Algorithm 1", _loosely_coupled),
    _baseline(
        "unaware", "joint search, frozen layers unknown", partial(_expecting, unaware_work)
    ),
    _baseline("layers", "equally many layers per stage", partial(_expecting, _layers)),
    _baseline("parameters", "equally many parameters per stage", partial(_expecting, _parameters)),
    _baseline("omnibal", "OmniBal §4.2", _joint),
)
"""Planners: problem -> proposal, without degrees within modules."""
