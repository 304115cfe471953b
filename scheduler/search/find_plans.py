"""Entry point of pipeline planning, for any planner. If the problem leaves recomputation open,
plans with recomputation are also searched once memory limits the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from raymm.errors import NoPlanError
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.progress.search_control import SearchControl
from raymm.scheduler.search.evaluation import Candidates, Option, Proposal, fastest_first
from raymm.scheduler.search.layouts import colocated, replicated
from raymm.scheduler.search.options import LAYERS, PlanProblem
from raymm.scheduler.search.planner import propose
from raymm.scheduler.search.stage_space import StageSpace

Planner = Callable[[PlanProblem], Proposal]
Searched = frozenset[tuple[str, bool | str]]
# A plan that fills this fraction of a rank's memory may be limited by it.
TIGHT = 0.8


def has_rank_each(problem: PlanProblem) -> bool:
    """Return True if there is a rank per module, which most planners require."""
    return problem.ranks >= len(problem.graph.nodes)


def find_plans(
    problem: PlanProblem, planner: Planner | None = None, control: SearchControl | None = None
) -> Proposal:
    """Plan a model with ``planner``, by default raymm's own, which reports its progress to
    ``control`` and may be ended early by it. Raise ``NoPlanError`` if no plan fits."""
    control = control or SearchControl()
    find = planner or partial(_own, control=control)
    try:
        proposal = find(problem)
    except NoPlanError:
        if problem.recompute is not None or planner is None and has_rank_each(problem):
            raise
        return find(replace(problem, recompute=True))
    # Also consider plans without degrees, so that degrees never hide a better plan.
    candidates = [proposal.best, *itertools.islice(filter(_is_pipelines, proposal.options), 1)]
    if problem.recompute is None and any(_is_tight(o, problem.memory_limit) for o in candidates):
        rest = planner or partial(_own, control=control, searched=proposal.searched)
        for again in (LAYERS, True):
            if control.should_stop():
                break
            with suppress(NoPlanError):
                proposal = _merged(proposal, rest(replace(problem, recompute=again)))
    return proposal


def space_of(problem: PlanProblem) -> StageSpace:
    """Return the space of stage counts for planners without degrees. With fewer ranks than modules,
    it has one rank per module."""
    return StageSpace(
        problem.graph, problem.profile, max(problem.ranks, len(problem.graph.nodes)),
        problem.num_microbatches, recompute=problem.recompute is True,
        memory_limit=problem.memory_limit,
    )


def _own(
    problem: PlanProblem, control: SearchControl, searched: Searched = frozenset()
) -> Proposal:
    """Run raymm's planner. With fewer ranks than modules, modules take turns on ranks."""
    if has_rank_each(problem):
        return propose(problem, control, searched)
    candidates = Candidates(problem.network, problem.schedules, control)
    control.searching("plans whose modules share ranks")
    for label, plan in time_shared_plans(space_of(problem), problem.ranks):
        if control.should_stop():
            break
        candidates.add_schedules(label, plan)
    return candidates.proposal()


def _is_tight(option: Option, limit: int | None) -> bool:
    if limit is None or any(stage.recompute for stage in option.plan.stages):
        return False
    return max(need.total for need in option.memory) > TIGHT * limit


def _is_pipelines(option: Option) -> bool:
    """Return True if the plan can be found without degrees."""
    plan = option.plan
    copies = any(stage.replica for stage in plan.stages)
    return plan.num_processes == plan.num_ranks and not (
        copies and option.layout == "modality_parallel"
    )


def _merged(first: Proposal, other: Proposal) -> Proposal:
    options = fastest_first((*first.options, *other.options))
    return Proposal(
        options, tuple(dict.fromkeys((*first.refused, *other.refused))),
        first.bound if options[0] is first.best else other.bound,
        first.combinations + other.combinations, first.simulated + other.simulated,
        first.searched | other.searched,
    )


SHARED = "encoders share a rank"


def time_shared_plans(space: StageSpace, ranks: int) -> Iterator[tuple[str, Plan]]:
    """Yield (name, plan) of ways to put a model on fewer ranks than modules: everything on one
    rank; all other modules on the first rank and those after the language model on the last, with
    as much of the language model as balances the ranks; and the layouts that share ranks anyway.
    The ``ranks`` of the space, one per module, are ignored."""
    graph = space.graph
    after = {graph.backbone, *graph.followers}
    first = {node.name: range(1) for node in graph.nodes if node.name not in after}
    if ranks == 1:
        yield "everything on one rank", replicated(space, 1, first)
        return
    with suppress(NoPlanError):
        yield SHARED, replicated(space, ranks, first)
    for encoder_ranks in range(1, ranks):
        with suppress(NoPlanError):  # not every model has this layout
            yield "colocated", colocated(space, encoder_ranks, ranks - encoder_ranks)
    with suppress(NoPlanError):
        yield "replicated", replicated(space, ranks)
