"""How many stages for which module: an exact search.

It chooses from a :class:`~raymm.scheduler.search.stage_space.StageSpace` and judges whole plans by
an iteration time that the caller supplies, usually a simulated one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

from raymm.errors import NoPlanError
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.progress.search_control import SearchControl
from raymm.scheduler.search.stage_space import ROUNDING, Counts, StageSpace

DEFAULT_ALTERNATIVES = 4
# How far a combination is bounded: by its counts, as it is cut, as a plan.
COUNTED, CUT, PLANNED = range(3)


@dataclass(frozen=True)
class Choice:
    """A plan that was evaluated: stages per module and seconds per iteration."""

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


def joint_search(
    space: StageSpace,
    iteration_time: Callable[[Plan], float],
    lower_bound: Callable[[Plan], float] | None = None,
    fits: Callable[[Plan], bool] | None = None,
    alternatives: int = DEFAULT_ALTERNATIVES,
    gap: float = ROUNDING,
    profile_bound: bool = True,
    incumbent: float = math.inf,
    most_plans: float = math.inf,
    control: SearchControl | None = None,
) -> SearchResult:
    """The fastest plan over all stage counts within the budget, and the next fastest.

    Branch and bound, best first: a combination is bounded however it is cut, then, when its turn
    comes, as it is cut, then as a plan by ``lower_bound``, and is simulated if it comes again. The
    search ends when nothing left can be faster. Of the same bound the fewest ranks come first.

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
        most_plans: how many are made, to bound or to simulate them, before the search ends with
            what it has; it is exact if it needs no more.
        control: is asked whether to end with what there is.

    Returns:
        The best plan and the alternatives with the same seconds (to within ``gap``) as
        judging every combination would give.

    Raises:
        NoPlanError: if no plan fits (or, of those that may be faster than the incumbent,
            none does).
    """
    modules = space.graph.topological
    queue = _counted(space, profile_bound)
    combinations, plans = len(queue), 0
    bounded: dict[tuple[int, ...], Plan] = {}  # on their way to be simulated
    evaluated: list[Choice] = []
    kept: list[float] = []  # the best times so far, negated: a heap with the worst of them first
    while queue:
        if control is not None and control.should_stop():
            break
        bound, size, level, chosen = heapq.heappop(queue)
        worst = -kept[0] if len(kept) > alternatives else math.inf
        if bound >= min(worst, incumbent) * (1 - gap):
            break
        counts = dict(zip(modules, chosen, strict=True))
        if level == COUNTED:
            if (cut := _bound_of(space, counts)) < math.inf:
                bound = max(bound, cut) if profile_bound else bound
                heapq.heappush(queue, (bound, size, CUT, chosen))
            continue
        plan = bounded.pop(chosen, None)
        if plan is None:
            plans += 1
            if plans > most_plans and evaluated:
                break
            plan = space.plan(counts)
        if level == CUT and lower_bound is not None:
            bound = max(bound, lower_bound(plan) * (1 - ROUNDING))
            heapq.heappush(queue, (bound, size, PLANNED, chosen))
            bounded[chosen] = plan
            continue
        if fits is not None and not fits(plan):
            continue
        evaluated.append(Choice(counts, plan, iteration_time(plan)))
        heapq.heappush(kept, -evaluated[-1].seconds)
        if len(kept) > alternatives + 1:
            heapq.heappop(kept)
    return search_result(space, evaluated, combinations, alternatives)


def _counted(
    space: StageSpace, profile_bound: bool
) -> list[tuple[float, int, int, tuple[int, ...]]]:
    """A heap of all combinations: bound, ranks, how far it is bounded, stages by module."""
    modules = space.graph.topological
    queue = [
        (
            _least_of(space, counts) if profile_bound else 0.0, sum(counts.values()), COUNTED,
            tuple(counts[m] for m in modules),
        )
        for counts in space.combinations()
    ]
    heapq.heapify(queue)
    return queue


def _least_of(space: StageSpace, counts: Counts) -> float:
    """Of stage counts, however they are cut."""
    return max(space.least_bound(m, n) for m, n in counts.items())


def _bound_of(space: StageSpace, counts: Counts) -> float:
    """As they are cut; ``inf`` where a module has no partition."""
    return max(space.lower_bound(m, n, space.beyond(m, counts)) for m, n in counts.items())


def search_result(
    space: StageSpace, evaluated: list[Choice], combinations: int, alternatives: int
) -> SearchResult:
    """The best of what was evaluated.

    Args:
        space: the ranks that there are, for the error.
        evaluated: plans with their seconds; they are sorted in place.
        combinations: how many numbers of stages were looked at, for the result.
        alternatives: how many plans besides the best the result has at most.

    Raises:
        NoPlanError: nothing was.
    """
    if not evaluated:
        more = "" if space.recompute else ", or turn recomputation on"
        raise NoPlanError(
            f"no plan found with at most {space.ranks} ranks that fits in memory; "
            f"give it more ranks or memory{more}"
        )
    evaluated.sort(key=lambda c: (c.seconds, sum(c.counts.values()), tuple(c.counts.values())))
    return SearchResult(
        evaluated[0], tuple(evaluated[1 : 1 + alternatives]), combinations, len(evaluated)
    )
