"""How many stages for which module: Cornstarch v1's Algorithm 1, and an exact search.

Both choose from the same :class:`~raymm.scheduler.search.stage_space.StageSpace` and judge whole
plans by an iteration time that the caller supplies, usually a simulated one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.search.stage_space import ROUNDING, Counts, StageSearchError, StageSpace

DEFAULT_ALTERNATIVES = 4


@dataclass(frozen=True)
class Choice:
    """A plan that was judged: stages per module and seconds per iteration."""

    counts: Counts
    plan: Plan
    seconds: float


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: the fastest plan.
        alternatives: the next fastest, best first.
        combinations: stage counts within the budget that the search chose from.
        simulated: of these, for how many an iteration time was computed.
    """

    best: Choice
    alternatives: tuple[Choice, ...]
    combinations: int
    simulated: int


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
        StageSearchError: if no plan fits.
    """
    llm = space.graph.sink
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
    return _result(space, evaluated, combinations, alternatives)


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


def joint_search(
    space: StageSpace,
    iteration_time: Callable[[Plan], float],
    lower_bound: Callable[[Plan], float] | None = None,
    fits: Callable[[Plan], bool] | None = None,
    alternatives: int = DEFAULT_ALTERNATIVES,
    gap: float = ROUNDING,
    profile_bound: bool = True,
    incumbent: float = math.inf,
) -> SearchResult:
    """The fastest plan over all stage counts within the budget, and the next fastest.

    Branch and bound, best first: a combination is first bounded module by module
    (:meth:`StageSpace.lower_bound`), then, when its turn comes, as a plan by ``lower_bound``,
    and is simulated only if its turn comes again. The search ends when nothing left can be
    faster than what it has. Of combinations with the same bound the one with the fewest ranks
    comes first.

    Args:
        space: what to choose from.
        iteration_time: seconds of one iteration of a plan.
        lower_bound: seconds that ``iteration_time`` of a plan is never below.
        fits: whether a plan fits in memory; all do by default.
        alternatives: how many of the next fastest plans to return as well. They are exact
            too, so they cost simulations.
        gap: plans that are faster by less than this share are not looked for. The default
            keeps rounding from deciding what is simulated, no more.
        profile_bound: whether ``iteration_time`` charges every stage at least what the
            profile says, for every microbatch. If not (say, microbatches that lack a
            modality), only ``lower_bound`` can be trusted.
        incumbent: seconds of a plan that is known; none that cannot be faster is looked for.

    Returns:
        The best plan and the alternatives with the same seconds (to within ``gap``) as
        judging every combination would give.

    Raises:
        StageSearchError: if no plan fits (or, of those that may be faster than the incumbent,
            none does).
    """
    modules = space.graph.topological

    def bound_of(counts: Counts) -> float:
        return max(space.lower_bound(m, n, space.beyond(m, counts)) for m, n in counts.items())

    queue: list[tuple[float, int, bool, tuple[int, ...]]] = [
        (
            bound_of(counts) if profile_bound else 0.0,
            sum(counts.values()),
            lower_bound is None,  # bounded as far as it will be?
            tuple(counts[m] for m in modules),
        )
        for counts in space.combinations()
    ]
    heapq.heapify(queue)
    combinations = len(queue)
    evaluated: list[Choice] = []
    kept: list[float] = []  # the best times so far, negated: a heap with the worst of them first
    while queue:
        bound, size, final, chosen = heapq.heappop(queue)
        if len(kept) > alternatives and bound >= -kept[0] * (1 - gap):
            break
        if bound >= incumbent * (1 - gap):
            break
        counts = dict(zip(modules, chosen, strict=True))
        plan = space.plan(counts)
        if not final and lower_bound is not None:
            bound = max(bound, lower_bound(plan) * (1 - ROUNDING))
            heapq.heappush(queue, (bound, size, True, chosen))
            continue
        if fits is not None and not fits(plan):
            continue
        evaluated.append(Choice(counts, plan, iteration_time(plan)))
        heapq.heappush(kept, -evaluated[-1].seconds)
        if len(kept) > alternatives + 1:
            heapq.heappop(kept)
    return _result(space, evaluated, combinations, alternatives)


def _result(
    space: StageSpace, evaluated: list[Choice], combinations: int, alternatives: int
) -> SearchResult:
    if not evaluated:
        more = "" if space.recompute else ", or turn recomputation on"
        raise StageSearchError(
            f"no plan found with at most {space.ranks} ranks that fits in memory; "
            f"give it more ranks or memory{more}"
        )
    evaluated.sort(key=lambda c: (c.seconds, sum(c.counts.values()), tuple(c.counts.values())))
    return SearchResult(
        evaluated[0], tuple(evaluated[1 : 1 + alternatives]), combinations, len(evaluated)
    )
