"""Exact search for the number of stages of each module.

It chooses from a :class:`~raymm.scheduler.search.stage_space.StageSpace` and compares whole plans
by an iteration time that the caller supplies, usually simulated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

from raymm.errors import NoPlanError
from raymm.plural import plural
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.progress.search_control import SearchControl
from raymm.scheduler.search.stage_space import ROUNDING, Counts, StageSpace

DEFAULT_ALTERNATIVES = 4
# Level of the bound of a combination: by its counts, by its partition, by its plan.
COUNTED, CUT, PLANNED = range(3)


@dataclass(frozen=True)
class Choice:
    """One evaluated plan: stages per module, and seconds per iteration."""

    counts: Counts
    plan: Plan
    seconds: float


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        alternatives: the next fastest plans, best first.
        combinations: number of stage counts within the budget.
        simulated: number of combinations whose iteration time was computed.
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
    """Return the fastest plan over all stage counts within the budget, and the next fastest.

    Best-first branch and bound: a combination is first bounded for any partition, then, when its
    turn comes, for its own partition, then as a plan by ``lower_bound``, and is simulated when its
    turn comes again. The search ends when none of the rest can be faster. Ties go to the fewest
    ranks.

    Args:
        iteration_time: returns the seconds of one iteration of a plan.
        lower_bound: returns a lower bound of ``iteration_time``.
        fits: returns True if a plan fits in memory; by default all do.
        alternatives: number of next fastest plans to return. They are exact too, so they cost
            simulations.
        gap: relative improvements below this are ignored. The default only keeps rounding from
            deciding what is simulated.
        profile_bound: True if ``iteration_time`` is at least the profile's time for every stage and
            microbatch. If not (for example, if microbatches lack a modality), only ``lower_bound``
            is used.
        incumbent: seconds of a known plan; slower plans are not searched.
        most_plans: number of plans to create before the search ends with the best so far; the
            search is exact if it needs no more.
        control: may end the search early.

    Returns:
        The best plan and alternatives, with the same seconds (to within ``gap``) as evaluating
        every combination would give.

    Raises:
        NoPlanError: no plan fits, or none of those that may be faster than the incumbent.
    """
    modules = space.graph.topological
    queue = _counted(space, profile_bound)
    combinations, plans = len(queue), 0
    bounded: dict[tuple[int, ...], Plan] = {}  # waiting to be simulated
    evaluated: list[Choice] = []
    kept: list[float] = []  # best times so far, negated: a heap with the worst of them first
    while queue:
        if control is not None and control.should_stop():
            break
        # Without time left, the first combination that fits is taken, whatever its bound.
        in_hurry = control is not None and control.stopped is not None
        bound, size, level, chosen = heapq.heappop(queue)
        worst = -kept[0] if len(kept) > alternatives else math.inf
        if bound >= min(worst, incumbent) * (1 - gap):
            break
        counts = dict(zip(modules, chosen, strict=True))
        if level == COUNTED:
            if (cut := _bound_of(space, counts)) == math.inf:
                continue
            if not in_hurry:
                bound = max(bound, cut) if profile_bound else bound
                heapq.heappush(queue, (bound, size, CUT, chosen))
                continue
        plan = bounded.pop(chosen, None)
        if plan is None:
            plans += 1
            if plans > most_plans and evaluated:
                break
            plan = space.plan(counts)
        if level == CUT and lower_bound is not None and not in_hurry:
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
    """Return a heap of all combinations: bound, ranks, level of the bound, stages by module."""
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
    """Return a lower bound for stage counts with any partition."""
    return max(space.least_bound(m, n) for m, n in counts.items())


def _bound_of(space: StageSpace, counts: Counts) -> float:
    """Return a lower bound for the partitions; ``inf`` if a module has no partition."""
    return max(space.lower_bound(m, n, space.beyond(m, counts)) for m, n in counts.items())


def search_result(
    space: StageSpace, evaluated: list[Choice], combinations: int, alternatives: int
) -> SearchResult:
    """Return the best of the evaluated plans, which are sorted in place, and at most
    ``alternatives`` others. Raise ``NoPlanError`` if no plan was evaluated."""
    if not evaluated:
        more = "" if space.recompute else ", or turn recomputation on"
        raise NoPlanError(
            f"no plan found with at most {plural(space.ranks, 'rank')} that fits in memory; "
            f"give it more ranks or memory{more}"
        )
    evaluated.sort(key=lambda c: (c.seconds, sum(c.counts.values()), tuple(c.counts.values())))
    return SearchResult(
        evaluated[0], tuple(evaluated[1 : 1 + alternatives]), combinations, len(evaluated)
    )
