"""Cornstarch v1's Algorithm 1: encoders that keep pace with the language model."""

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
    """Plan with Cornstarch v1's Algorithm 1.

    Cut the module that computes the loss (the language model) into every number of stages, give
    each other module the fewest stages that are no slower than the language model's slowest, and
    keep the fastest of these plans.

    An encoder that cannot keep pace gets as many stages as the budget allows. The printed algorithm
    has no budget; plans above it are left out, which for a small budget can exclude every balanced
    plan, and even all plans.

    Args:
        iteration_time: returns the seconds of one iteration of a plan.
        fits: returns True if a plan fits in memory; by default all do.
        alternatives: number of next fastest plans to return.
        relax: True to lower the required pace of the encoders until they are within the budget,
            instead of leaving such plans out (not in the paper, and much better).

    Raises:
        NoPlanError: no plan fits.
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
    """Return the fewest stages per module that keep pace; those in ``start`` are fixed.

    Relaxed, return the next slower pace at which all modules are within the budget.
    """
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
