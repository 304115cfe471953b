"""Choice of a step's program from the real sizes of its samples.

A plan is made for microbatches of average size. This module assigns the samples of one step to
microbatches, orders these, and picks a schedule, by simulating the plan with the work of the
samples. The choice depends on its arguments alone, so a resumed run that gives the same samples
makes the same choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raymm.errors import NoPlanError, PlanError
from raymm.scheduler.minibatch.levelling import MOST_CANDIDATES, exchange_steps, level
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.planned_step import PlannedStep
from raymm.scheduler.schedule.step_graph import active_stages

Groups = tuple[tuple[int, ...], ...]
"""Samples of each microbatch."""

Present = tuple[tuple[str, ...], ...]
"""Modules with input of each microbatch."""

# Distance above the mean load of a microbatch that levelling accepts, as a fraction.
TOLERANCE = 0.01
# Most exchanges of two samples per step.
EXCHANGES = 500


@dataclass(frozen=True)
class StepChoice:
    """Program of a step.

    Attributes:
        groups: samples of each microbatch, in the order in which all stages run microbatches.
        schedule: name of the schedule.
        seconds: simulated seconds of the step.
        fixed_seconds: simulated seconds of the samples in their given order under the plan's
            schedule.
    """

    groups: Groups
    schedule: str
    seconds: float
    fixed_seconds: float


def choose_step(
    plan: Plan, work: Mapping[str, np.ndarray], schedules: Sequence[str] = ()
) -> StepChoice:
    """Choose the program of a step.

    The result is never slower in the simulation than the samples in their given order under any of
    the schedules, and keeps the plan's ``activation_limits``.

    Args:
        plan: plan with a profile, whose costs are those of a microbatch with load 1.
        work: (N,) work of each sample by module, as a fraction of that load; 0 for samples without
            input for the module.
        schedules: names to choose from, in addition to the plan's.

    Raises:
        PlanError: there are fewer samples than microbatches, or modules are unknown.
        NoPlanError: no choice fits in the plan's ``activation_limits``.
    """
    work = {name: np.asarray(values, dtype=float) for name, values in work.items()}
    names = [node.name for node in plan.graph.nodes]
    counts = {len(values) for values in work.values()}
    if unknown := sorted(set(work) - set(names)):
        raise PlanError(f"work names {unknown}; modules are {names}")
    if len(counts) != 1 or min(counts) < plan.num_microbatches:
        raise PlanError(
            f"work has {sorted(counts)} samples; accepted: the same number for each module, at "
            f"least the {plan.num_microbatches} microbatches of the plan"
        )
    in_order = given_groups(counts.pop(), plan.num_microbatches)
    options = tuple(dict.fromkeys((plan.schedule, *schedules)))
    tried: dict[tuple[Groups, str], float] = {}
    steps: dict[Present, PlannedStep] = {}

    def seconds(groups: Groups, name: str, until: float = float("inf")) -> float:
        """Return the seconds of a step; those above ``until`` may be infinite."""
        if (groups, name) not in tried:
            loads = group_loads(work, groups)
            present = _present(loads)
            if present not in steps:
                steps[present] = PlannedStep(plan, active_stages(plan, present))
            try:
                tried[groups, name] = steps[present].with_loads(name, loads, until).seconds()
            except NoPlanError:
                tried[groups, name] = float("inf")
        return tried[groups, name]

    def fastest(candidates: Iterable[tuple[Groups, str]]) -> tuple[Groups, str]:
        best, least = next(iter(candidates)), float("inf")
        for option in candidates:
            if (taken := seconds(*option, least)) < least:
                best, least = option, taken
        return best

    fixed_seconds = seconds(in_order, plan.schedule)
    best = fastest([(in_order, name) for name in options])
    levelled = [in_order, level_groups(work, plan), hierarchical_groups(work, plan)]
    orders = [groups for grouping in dict.fromkeys(levelled)
        for groups in _orders(work, grouping)]
    # The two fastest orders are tried under all schedules. With one schedule, the fastest counts.
    least = [seconds(*best)] if len(options) == 1 else []
    for groups in reversed(orders):  # the fastest is mostly among the last
        kept = 1 if len(options) == 1 else 2
        until = least[kept - 1] if len(least) >= kept else float("inf")
        least = sorted([*least, seconds(groups, best[1], until)])[:kept]
    orders.sort(key=lambda groups: seconds(groups, best[1]))
    best = fastest([best, *((groups, name) for groups in orders[:2] for name in options)])
    if seconds(*best) == float("inf"):
        raise NoPlanError(
            f"activation limits {plan.activation_limits} leave no room for the step's samples"
        )
    return StepChoice(best[0], best[1], seconds(*best), fixed_seconds)


def planned_step(plan: Plan, work: Mapping[str, np.ndarray], groups: Groups) -> PlannedStep:
    """Return the step of a plan with the loads of its microbatches."""
    loads = group_loads(work, groups)
    return PlannedStep(plan, active_stages(plan, _present(loads)), loads=loads)


def step_seconds(plan: Plan, work: Mapping[str, np.ndarray], groups: Groups) -> float:
    """Return the simulated seconds of a step."""
    return planned_step(plan, work, groups).seconds()


def _present(loads: Mapping[str, np.ndarray]) -> Present:
    """Return the modules with input of each microbatch."""
    counts = {len(load) for load in loads.values()}
    return tuple(
        tuple(name for name, load in loads.items() if load[number] > 0)
        for number in range(*counts)
    )


def group_loads(work: Mapping[str, np.ndarray], groups: Groups) -> dict[str, np.ndarray]:
    """Return the (M,) load of each microbatch by module."""
    return {
        name: np.array([values[list(group)].sum() for group in groups])
        for name, values in work.items()
    }


def given_groups(samples: int, microbatches: int) -> Groups:
    """Return consecutive samples in groups of equal size, up to one."""
    return tuple(
        tuple(group.tolist()) for group in np.array_split(np.arange(samples), microbatches)
    )


def level_groups(work: Mapping[str, np.ndarray], plan: Plan) -> Groups:
    """Return groups that are about equally large in every module."""
    sizes = _sizes(work, plan)
    return _levelled(sizes, sizes.max(axis=1), plan.num_microbatches, sizes)


def hierarchical_groups(work: Mapping[str, np.ndarray], plan: Plan) -> Groups:
    """Return groups that are equally large first for the encoders, and then, as far as these stay
    so, for the other modules (arXiv 2605.27918, hierarchical microbatch assignment)."""
    sizes = _sizes(work, plan)
    after = {plan.graph.backbone, *plan.graph.followers}
    encoders = [name not in after for name in work]
    if not any(encoders):
        return level_groups(work, plan)
    first = np.ascontiguousarray(sizes[:, encoders])
    columns = np.argsort(np.logical_not(encoders), kind="stable")
    sizes = np.ascontiguousarray(sizes[:, columns])
    return _levelled(first, first.sum(axis=1), plan.num_microbatches, sizes, first.shape[1])


def _sizes(work: Mapping[str, np.ndarray], plan: Plan) -> np.ndarray:
    """Return (N, C) work, scaled so that the mean group is 1 in each column with any."""
    sizes = np.stack(list(work.values()), axis=1)
    totals = sizes.sum(axis=0)
    return np.ascontiguousarray(sizes * (plan.num_microbatches / np.where(totals > 0, totals, 1)))


def _levelled(
    first: np.ndarray, largest: np.ndarray, count: int, sizes: np.ndarray, capped: int = 0
) -> Groups:
    """Return groups levelled by the columns of ``first``, then by those of ``sizes`` such that no
    group grows above the largest one in the first ``capped`` of these."""
    order = np.argsort(-largest, kind="stable")
    group_of = np.zeros(len(sizes), dtype=np.int64)
    budgets = np.full(first.shape[1], np.inf)
    level(first, order, budgets, count, group_of, np.zeros((0, first.shape[1])))
    for empty in sorted(set(range(count)) - set(group_of.tolist())):
        fullest = np.bincount(group_of, minlength=count).argmax()
        members = np.flatnonzero(group_of == fullest)
        group_of[members[largest[members].argmin()]] = empty
    samples = np.argsort(group_of, kind="stable")
    members = np.bincount(group_of, minlength=count)
    offsets = np.concatenate([[0], np.cumsum(members)]).astype(np.int64)
    budgets = np.full(sizes.shape[1], np.inf)
    loads = np.add.reduceat(sizes[samples], offsets[:-1], axis=0)
    budgets[:capped] = loads[:, :capped].max(axis=0, initial=0.0) * (1 + TOLERANCE)
    exchange_steps(
        sizes, samples, offsets, count, budgets, TOLERANCE, EXCHANGES, MOST_CANDIDATES, False
    )
    return tuple(
        tuple(sorted(samples[begin:end].tolist()))
        for begin, end in zip(offsets, offsets[1:], strict=False)
    )


def _orders(work: Mapping[str, np.ndarray], groups: Groups) -> Iterator[Groups]:
    """Yield the groups in their order, and with the small ones at both ends, where they fill and
    drain the pipeline."""
    yield groups
    loads = np.sum(list(group_loads(work, groups).values()), axis=0)
    rising = np.argsort(loads, kind="stable").tolist()
    yield tuple(groups[number] for number in rising[::2] + rising[1::2][::-1])
