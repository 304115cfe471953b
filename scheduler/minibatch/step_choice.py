"""Choice of a step's program from the real sizes of its samples.

A plan is made for microbatches of average size. :func:`choose_step` assigns the samples of one step
to microbatches, orders these, and picks a schedule, by simulating the plan with the work of the
samples. :class:`OrderChooser`, which training uses, does so for given microbatches. The choice
depends on its arguments alone, so a resumed run that gives the same samples makes the same choice.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from raymm.errors import NoPlanError, PlanError
from raymm.scheduler.minibatch.levelling import MOST_CANDIDATES, exchange_steps, level
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.bounds import least_seconds
from raymm.scheduler.schedule.list_schedule import StepSchedule
from raymm.scheduler.schedule.memory import memory_of
from raymm.scheduler.schedule.planned_step import PlannedStep
from raymm.scheduler.schedule.stage_costs import stage_costs
from raymm.scheduler.schedule.step_graph import active_stages, full_step

Groups = tuple[tuple[int, ...], ...]
"""Samples of each microbatch."""

Present = tuple[tuple[str, ...], ...]
"""Modules with input of each microbatch."""

# Distance above the mean load of a microbatch that levelling accepts, as a fraction.
TOLERANCE = 0.01
# Most exchanges of two samples per step.
EXCHANGES = 500
# Number of cached programs, one per schedule and pattern of modules over microbatches.
STEPS = 64
# Limits of a local search for an order: swaps of two microbatches, and simulated tasks, which bound
# its time.
MOST_SWAPS = 48
SWAPPED_TASKS = 100_000


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


@dataclass(frozen=True)
class StepOrder:
    """Order of a step's microbatches, and its schedule.

    Attributes:
        order: numbers of the given microbatches, in the order in which all stages run them.
        schedule: name of the schedule.
        seconds: simulated seconds of the step.
        fixed_seconds: simulated seconds of the given order under the plan's schedule.
        bound: lower bound of the seconds of all orders and schedules of the layout.
    """

    order: tuple[int, ...]
    schedule: str
    seconds: float
    fixed_seconds: float
    bound: float


class OrderChooser:
    """Chooses order and schedule of the microbatches of steps.

    In contrast to :func:`choose_step`, the samples of a microbatch stay together, and ranks run the
    programs of :func:`raymm.scheduler.schedule.lower.lower`, which do not depend on loads. A choice
    therefore only times a few programs. It is a function of the plan and the
    loads.

    Args:
        schedules: names to choose from, in addition to the plan's.

    Raises:
        PlanError: the simulator cannot time the plan's microbatches one by one.
    """

    def __init__(self, plan: Plan, schedules: Sequence[str] = ()) -> None:
        check_loads(plan)
        self._plans = {plan.schedule: plan} | {
            name: replace(plan, schedule=name) for name in schedules if name != plan.schedule
        }
        self._plan = plan
        self._steps: OrderedDict[tuple[str, Present], PlannedStep] = OrderedDict()
        self._peaks = PlannedStep(plan, active_stages(plan, full_step(plan))).peaks()
        tasks = 2 * len(plan.stages) * plan.num_microbatches
        self._swaps = min(MOST_SWAPS, SWAPPED_TASKS // tasks)

    def choose(self, loads: Mapping[str, np.ndarray]) -> StepOrder:
        """Choose order and schedule of a step.

        The step is never slower in the simulation than in the given order under the plan's
        schedule. It keeps the plan's ``memory_limit``. Without one, no rank needs more memory than
        the fullest rank in that step or in a step of the plan.

        Args:
            loads: (M,) load of each microbatch by module, as a fraction of that of the plan's
                profile; 0 for microbatches without input for the module.
        """
        data_order = tuple(range(len(next(iter(loads.values())))))
        first, kinds = self._plan.schedule, _present(loads)
        seconds: dict[tuple[tuple[int, ...], str], float] = {}
        programs: dict[tuple[tuple[int, ...], str], tuple[PlannedStep, StepSchedule]] = {}

        def try_program(order: tuple[int, ...], schedule: str) -> None:
            if (order, schedule) in seconds:
                return
            ordered = {name: load[list(order)] for name, load in loads.items()}
            try:
                step = self._step(schedule, _present(ordered))
            except NoPlanError:
                return
            program = step.reloaded(ordered)
            programs[order, schedule] = step, program
            seconds[order, schedule] = step.replayed(program)

        for order in dict.fromkeys((data_order, *self._orders(loads))):
            try_program(order, first)
        fastest = sorted(seconds, key=lambda option: seconds[option])
        for order, _ in fastest[:2]:
            for name in self._plans:
                try_program(order, name)
        draws = random.Random(0)  # the same for equal steps
        for _ in range(self._swaps):
            order, name = min(seconds, key=lambda option: seconds[option])
            number = draws.choice(order)
            equal = [m for m in order if m != number and kinds[m] == kinds[number]]
            if equal:  # the program stays the same
                swapped = {number: (other := draws.choice(equal)), other: number}
                try_program(tuple(swapped.get(m, m) for m in order), name)
        step, program = programs[data_order, first]
        room = self._room(step.activation_peaks(program))
        for order, name in sorted(seconds, key=lambda option: seconds[option]):
            chosen, tasks = programs[order, name]
            if (order, name) == (data_order, first) or room >= max(
                need.total for need in memory_of(self._plan, chosen.activation_peaks(tasks))
            ):
                break
        return StepOrder(
            order, name, seconds[order, name], seconds[data_order, first],
            least_seconds(self._plan, program.parts),
        )

    def _step(self, schedule: str, present: Present) -> PlannedStep:
        key = schedule, present
        if key not in self._steps:
            plan = self._plans[schedule]
            step = PlannedStep(plan, active_stages(plan, present))
            assert step.listed is not None
            self._steps[key] = step
            if len(self._steps) > STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return self._steps[key]

    def _room(self, fixed_peaks: Sequence[int]) -> int:
        """Return the bytes that each rank may need."""
        if self._plan.memory_limit is not None:
            return self._plan.memory_limit
        peaks = tuple(map(max, fixed_peaks, self._peaks))
        return max(need.total for need in memory_of(self._plan, peaks))

    def _orders(self, loads: Mapping[str, np.ndarray]) -> Iterator[tuple[int, ...]]:
        """Yield orders that are often fast: by size, with the small ones at both ends, where they
        fill and drain the pipeline, and with the encoders ahead (Johnson's rule for two machines);
        of replicas, each gets about equal work."""
        plan = self._plan
        costs, seconds = stage_costs(plan), {}
        for name, load in loads.items():
            stages = plan.replicas(name)[0]
            seconds[name] = load * sum(
                cost.forward + cost.backward_input + cost.backward_weight
                for stage in stages for cost in [costs[stage.id]]
            )
        after = {plan.graph.backbone, *plan.graph.followers}
        none = np.zeros(len(next(iter(loads.values()))))
        encoders = sum((s for name, s in seconds.items() if name not in after), none)
        others = sum((s for name, s in seconds.items() if name in after), none)
        total = encoders + others
        groups: dict[tuple[str, ...], list[int]] = {}
        for number, modules in enumerate(_present(loads)):
            groups.setdefault(modules, []).append(number)
        # Microbatches with the same modules stay together, so that there are few programs.
        grouped = [groups[modules] for modules in sorted(groups, key=lambda m: (len(m), m))]

        def arranged(few_first: bool, arrange: Callable[[list[int]], list[int]]) -> list[int]:
            return [m for group in grouped[:: 1 if few_first else -1] for m in arrange(group)]

        def rising(group: list[int]) -> list[int]:
            return sorted(group, key=lambda m: total[m])

        def ends(group: list[int]) -> list[int]:
            return rising(group)[::2] + rising(group)[1::2][::-1]

        def ahead(group: list[int]) -> list[int]:
            first = [m for m in group if encoders[m] < others[m]]
            after = [m for m in group if encoders[m] >= others[m]]
            first.sort(key=lambda m: encoders[m])
            return first + sorted(after, key=lambda m: -others[m])

        orders = [arranged(True, ends), arranged(True, ahead), arranged(False, ends)]
        if len(grouped) == 1:
            orders[2:] = [rising(grouped[0]), rising(grouped[0])[::-1]]
        replicas = max(len(plan.replicas(name)) for name in loads)
        for order in orders:
            yield tuple(order)
            if replicas > 1:
                # Replica r runs every microbatch m with m % replicas == r.
                rounds = [order[i : i + replicas] for i in range(0, len(order), replicas)]
                yield tuple(
                    number for index, numbers in enumerate(rounds)
                    for number in (numbers[::-1] if index % 2 else numbers)
                )


def check_loads(plan: Plan) -> None:
    """Raise ``PlanError`` for a plan whose microbatches the simulator cannot time one by one."""
    reason = None
    if plan.profile is None:
        reason = "it has no profile; accepted: plans that raymm makes"
    elif plan.uses_slots or any(stage.quota is not None for stage in plan.stages):
        reason = "it has slots or quotas; accepted: pipelined plans"
    elif plan.splits_samples:
        reason = "its replicas split samples; accepted: replicas that split microbatches"
    elif any(stage.microbatch_factor > 1 for stage in plan.stages):
        reason = "its encoders join microbatches; accepted: microbatch_factor 1"
    elif PlannedStep(plan, active_stages(plan, full_step(plan))).listed is None:
        reason = f"schedule {plan.schedule!r} is a custom one; accepted: schedules of raymm"
    if reason is not None:
        raise PlanError(f"the plan cannot be chosen per batch: {reason}")
