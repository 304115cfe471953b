"""Cornstarch v1's Algorithm 1: encoders that keep the pace of the language model."""

from __future__ import annotations

import math
from collections.abc import Callable

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.search.stage_search import (
    DEFAULT_ALTERNATIVES,
    Choice,
    SearchResult,
    search_result,
)
from raymm.scheduler.search.stage_space import Counts, StageSpace


def loosely_coupled(
    space: StageSpace,
    iteration_time: Callable[[Plan], float],
    fits: Callable[[Plan], bool] | None = None,
    alternatives: int = DEFAULT_ALTERNATIVES,
    relax: bool = False,
) -> SearchResult:
    """Cornstarch v1's Algorithm 1: cut the module that computes the loss (the language model)
    into every number of stages, give each other module the fewest stages that are no slower
    than the language model's slowest, and keep the fastest of these plans.

    An encoder that cannot keep the pace gets as many stages as the budget can leave it. The
    algorithm as printed knows no budget; plans over it are left out, which on a small one can
    leave out every balanced plan, and even all.

    Args:
        space: what to choose from.
        iteration_time: seconds of one iteration of a plan.
        fits: whether a plan fits in memory; all do by default.
        alternatives: how many of the next fastest plans to return.
        relax: instead of leaving such plans out, slow down the pace asked of the encoders
            until they are within the budget (not in the paper, and much better).

    Raises:
        NoPlanError: if no plan fits.
    """
    llm = space.graph.backbone
    combinations = 0
    evaluated = []
    for count in space.possible(llm):
        counts = _pace_encoders(space, {llm: count}, space.bottleneck(llm, count), relax)
        if counts is None:
            continue
        combinations += 1
        plan = space.plan(counts)
        if fits is None or fits(plan):
            evaluated.append(Choice(counts, plan, iteration_time(plan)))
    return search_result(space, evaluated, combinations, alternatives)


def _pace_encoders(
    space: StageSpace, start: Counts, pace: float, relax: bool
) -> Counts | None:
    """Stages for every module, those in ``start`` given: the fewest that keep the pace, or,
    relaxed, the next slower pace at which all are within the budget."""
    encoders = [module for module in reversed(space.graph.topological) if module not in start]
    most = space.ranks - sum(start.values()) - (len(encoders) - 1)
    while pace < math.inf:
        counts, slower = dict(start), math.inf
        for encoder in encoders:
            beyond = space.beyond(encoder, counts)
            options = space.possible(encoder, beyond, most)
            if not options:
                return None
            times = {n: space.bottleneck(encoder, n, beyond) for n in options}
            counts[encoder] = next((n for n in options if times[n] <= pace), options[-1])
            slower = min([slower, *(times[n] for n in options if n < counts[encoder])])
        if sum(counts.values()) <= space.ranks:
            return {module: counts[module] for module in space.graph.topological}
        pace = slower if relax else math.inf
    return None
