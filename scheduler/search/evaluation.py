"""Evaluation of plans: simulated step time with messages, and memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from raymm.errors import NoPlanError, PlanError
from raymm.plural import plural
from raymm.scheduler.plan.equal_part import EqualPart
from raymm.scheduler.plan.microbatch_groups import group_spans
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.program import Program
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.progress.search_control import SearchControl
from raymm.scheduler.schedule.bounds import lower_bound, one_f_one_b_bound
from raymm.scheduler.schedule.lower import Forecast, forecast, full_program, refine
from raymm.scheduler.schedule.memory import RankMemory, check_needs, memory_of
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import group_seconds, op_seconds, stage_costs
from raymm.scheduler.schedules.registry import find_schedule
from raymm.scheduler.search.module_degrees import rank_text
from raymm.scheduler.search.stage_search import SearchResult

# The search for a policy minimises time within 1F1B's memory, so plans that are this far above the
# limit before the search stay above it.
HOPELESS = 1.05


@dataclass(frozen=True)
class Option:
    """One evaluated plan.

    Attributes:
        layout: one of :data:`raymm.scheduler.search.options.LAYOUTS`, with the chunks per rank if
            there are several, or the name of another strategy.
        seconds: simulated seconds of an iteration with messages, for the program of
            ``lower(plan)``.
        memory: bytes per rank, for one of its processes.
    """

    layout: str
    plan: Plan
    seconds: float
    memory: tuple[RankMemory, ...]

    @property
    def label(self) -> str:
        """Label such as ``"modality_parallel: vision 1, llm 5; 6 ranks, zero_bubble"``. A module
        with degrees reads ``"llm 2 (tp 4) x3"``: three replicas of two stages of four processes."""
        counts = ", ".join(
            f"{node.name} {module_text(self.plan, node.name)}" for node in self.plan.graph.nodes
        )
        how = self.plan.schedule
        if any(stage.recompute for stage in self.plan.stages):
            how += ", recomputing"
        elif any(stage.layer_options for stage in self.plan.stages):
            how += ", layers recomputing"
        return f"{self.layout}: {counts}; {places_text(self.plan)}, {how}"


def module_text(plan: Plan, module: str) -> str:
    """Return stages and degrees of a module, e.g. ``"2 (tp 4) x3"``."""
    replicas = plan.replicas(module)
    factor = replicas[0][0].microbatch_factor
    shared = f"{factor} microbatches per forward" if factor > 1 else ""
    within = ", ".join(filter(None, (rank_text(replicas[0][0].degrees), shared)))
    return (
        f"{len(replicas[0])}" + (f" ({within})" if within else "")
        + (f" x{len(replicas)}" if len(replicas) > 1 else "")
    )


def places_text(plan: Plan) -> str:
    """Return e.g. ``"6 ranks"``, or ``"6 ranks, 24 devices"`` if some ranks are several
    processes."""
    text, processes = plural(plan.num_ranks, "rank"), plan.num_processes
    return text if processes == plan.num_ranks else f"{text}, {plural(processes, 'device')}"


@dataclass(frozen=True)
class Proposal:
    """Result of a planner.

    Attributes:
        options: evaluated plans that fit, fastest first.
        refused: (label, reason) of plans that do not fit.
        bound: lower bound of the seconds of all schedules of the best plan.
        combinations, simulated: number of stage counts, and how many of them were simulated.
        searched: (layout, recompute) pairs that were searched.
    """

    options: tuple[Option, ...]
    refused: tuple[tuple[str, str], ...]
    bound: float
    combinations: int
    simulated: int
    searched: frozenset[tuple[str, bool | str]] = frozenset()

    @property
    def best(self) -> Option:
        return self.options[0]


def fastest_first(options: Iterable[Option]) -> tuple[Option, ...]:
    """Sort options by seconds, then by number of devices."""
    return tuple(sorted(options, key=lambda option: (option.seconds, option.plan.num_processes)))


def step_timeline(plan: Plan, network: Network, program: Program | None = None) -> Timeline:
    """Simulate a step of a plan with a profile, with messages. ``program`` is by default the
    trainer's program for a step with every modality in every microbatch. Its order of work does not
    depend on the time of messages."""
    program = full_program(plan) if program is None else program
    return simulate(
        program, op_seconds(plan), transfers=network.transfers(plan),
        group_seconds=group_seconds(plan), posted=plan.posted_receives, spans=group_spans(plan),
    )


def step_bound(plan: Plan, network: Network) -> float:
    """Return a lower bound of the seconds of all schedules of the plan."""
    return lower_bound(plan, network.delays(plan))


def evaluate(plan: Plan, network: Network, layout: str = "") -> tuple[Option, str | None]:
    """Evaluate a plan with a profile; also return the reason if it does not fit in memory. The plan
    of the option has the policy that was found for its schedule. ``layout`` names the option."""
    if find_schedule(plan.schedule).searches_policy and plan.policy is None:
        if plan.memory_limit is not None:
            step = forecast(plan, network.transfers(plan))
            needs = memory_of(plan, step.activation_peaks)
            if max(need.total for need in needs) > HOPELESS * plan.memory_limit:
                return Option(layout, plan, step.seconds, needs), _too_full(plan, needs)
        plan, _ = refine(plan, network.delays(plan))
    step = forecast(plan, network.transfers(plan))
    needs = memory_of(plan, step.activation_peaks)
    return Option(layout, plan, step.seconds, needs), _too_full(plan, needs)


def _too_full(plan: Plan, needs: Sequence[RankMemory]) -> str | None:
    try:
        check_needs(plan, needs)
    except PlanError as error:
        return str(error)
    return None


def busiest_rank(plan: Plan) -> tuple[int, float]:
    """Return the rank that works longest in a step, and its seconds of compute, collectives within
    the rank and recomputation, without messages and bubbles."""
    costs = stage_costs(plan)

    def seconds(rank: int) -> float:
        total = 0.0
        for stage in plan.rank_stages(rank):
            cost, replicas = costs[stage.id], len(plan.replicas(stage.module))
            once = (2 if stage.recompute else 1) * cost.forward
            once += cost.backward_input + cost.backward_weight
            total += once * len(range(stage.replica, plan.num_microbatches, replicas))
        return total

    by_rank = [seconds(rank) for rank in range(plan.num_ranks)]
    busiest = max(range(plan.num_ranks), key=by_rank.__getitem__)
    return busiest, by_rank[busiest]


def limit_text(plan: Plan, seconds: float) -> str:
    """Return a text that says what limits a plan. ``seconds`` is its step time."""
    rank, busy = busiest_rank(plan)
    names = ", ".join(str(stage.id) for stage in plan.rank_stages(rank))
    share = busy / seconds if seconds else 1.0
    again = any(stage.recompute or stage.layer_options for stage in plan.rank_stages(rank))
    text = f"{names} computes {share:.0%} of it" + (", recomputed to save memory" if again else "")
    return text if share > 0.5 else f"bubbles and messages are {1 - share:.0%} of it"


class Candidates:
    """Plans of a planner, with their evaluation: ``options`` and ``refused`` are as in
    :class:`Proposal`, in order of arrival. ``schedules`` are those that :meth:`add_schedules`
    tries."""

    def __init__(
        self, network: Network, schedules: Sequence[str], control: SearchControl | None = None
    ) -> None:
        self.network = network
        self.control = control or SearchControl()
        self.schedules = schedules
        self.options: list[Option] = []
        self.refused: list[tuple[str, str]] = []
        self._combinations = self._simulated = 0
        self._last: tuple[Plan, Forecast] | None = None
        self._evaluated: tuple[Plan, float] | None = None
        self._fitting: Plan | None = None  # last plan that was found to fit

    def seconds(self, plan: Plan) -> float:
        """Return the seconds of a step, as in options; for searches."""
        seconds = self._forecast(plan).seconds
        if plan is self._fitting:
            self.control.fits(seconds, partial(limit_text, plan, seconds))
        return seconds

    def _forecast(self, plan: Plan) -> Forecast:
        """Return the forecast of a plan; the last one is cached, because searches need memory and
        then time."""
        if self._last is None or self._last[0] is not plan:
            self._last = plan, forecast(plan, self.network.transfers(plan))
            self.control.tried()
        return self._last[1]

    def bound(self, plan: Plan) -> float:
        """Return a lower bound of a plan's seconds, for searches."""
        held = find_schedule(plan.schedule).holds_warm_up
        bound = one_f_one_b_bound if held else lower_bound
        return bound(plan, self.network.delays(plan))

    def fits(self, plan: Plan) -> bool:
        """Return True if a plan fits in memory, for searches."""
        if plan.memory_limit is not None:
            without = memory_of(plan, [0] * plan.num_ranks)  # a lower bound that is fast to compute
            if _too_full(plan, without) is not None:
                return False
            needs = memory_of(plan, self._forecast(plan).activation_peaks)
            if _too_full(plan, needs) is not None:
                return False
        self._fitting = plan
        return True

    def best_seconds(self, plan: Plan) -> float:
        """Return the seconds of a step under the fastest of the schedules with which the plan fits
        in memory; infinity if it fits with none."""
        if self._evaluated is None or self._evaluated[0] is not plan:
            seconds = math.inf
            for schedule in self._possible(plan):
                option, reason = evaluate(replace(plan, schedule=schedule), self.network)
                self.control.tried()
                if reason is None:
                    text = partial(limit_text, option.plan, option.seconds)
                    self.control.fits(option.seconds, text)
                    seconds = min(seconds, option.seconds)
            self._evaluated = plan, seconds
        return self._evaluated[1]

    def best_bound(self, plan: Plan) -> float:
        """Return a lower bound of :meth:`best_seconds`."""
        plans = [replace(plan, schedule=schedule) for schedule in self._possible(plan)]
        return min(map(self.bound, plans), default=math.inf)

    def any_fits(self, plan: Plan) -> bool:
        """Return True if a plan fits in memory with one of the schedules."""
        return self.best_seconds(plan) < math.inf

    def _possible(self, plan: Plan) -> list[str]:
        """Return the schedules that a plan can have."""
        # Both halves of a split backward would recompute the activations.
        whole = any(stage.layer_options for stage in plan.stages)
        return [s for s in self.schedules if not whole or not find_schedule(s).splits_backward]

    def count(self, result: SearchResult) -> None:
        """Count the combinations and simulations of a search."""
        self._combinations += result.combinations
        self._simulated += result.simulated

    def add(self, layout: str, plan: Plan) -> None:
        """Evaluate a plan and add it to the options or the refused plans."""
        option, reason = evaluate(plan, self.network, layout)
        self.control.tried()
        if reason is None:
            self.control.fits(option.seconds, partial(limit_text, option.plan, option.seconds))
            self.options.append(option)
        else:
            whole = option.plan.whole() if isinstance(option.plan, EqualPart) else option.plan
            self.refused.append((replace(option, plan=whole).label, reason))

    def add_schedules(self, layout: str, plan: Plan) -> None:
        """:meth:`add` a plan with every schedule that it can have, or only until one fits if the
        search must end."""
        possible = self._possible(plan)
        for schedule in sorted(possible, key=lambda name: name != plan.schedule):
            if self.options and self.control.stopped is not None:
                return
            self.add(layout, replace(plan, schedule=schedule))

    def proposal(self) -> Proposal:
        """Return everything that was added; raise ``NoPlanError`` if no plan fits."""
        evaluated, self.options = fastest_first(self.options), []
        for option in evaluated:
            if self.options and self.control.stopped is not None:
                break
            if isinstance(option.plan, EqualPart):
                self.add(option.layout, option.plan.whole())
            else:
                self.options.append(option)
        if not self.options:
            reasons = "; ".join(f"{label}: {why}" for label, why in self.refused)
            raise NoPlanError(f"no plan fits: {reasons or 'there is none for this model'}")
        options = fastest_first(self.options)
        return Proposal(
            options, tuple(self.refused), step_bound(options[0].plan, self.network),
            self._combinations, self._simulated,
        )
