"""What planners judge plans by: simulated seconds of a step with messages, and memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from raymm.scheduler.plan.plan import Plan, PlanError
from raymm.scheduler.program.program import Program
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.bounds import lower_bound
from raymm.scheduler.schedule.lower import full_program, iteration_time, refine
from raymm.scheduler.schedule.memory import RankMemory, check_memory, rank_memory
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds
from raymm.scheduler.search.module_degrees import rank_text
from raymm.scheduler.search.stage_search import SearchResult
from raymm.scheduler.search.stage_space import StageSearchError


@dataclass(frozen=True)
class Option:
    """One plan that was judged.

    Attributes:
        layout: one of :data:`raymm.scheduler.search.options.LAYOUTS`, with the chunks per rank if
            there are several, or the name of another strategy.
        plan: the plan.
        seconds: simulated seconds of an iteration: of the program that ``lower(plan)`` gives,
            with messages.
        memory: bytes per rank, of one of its processes.
    """

    layout: str
    plan: Plan
    seconds: float
    memory: tuple[RankMemory, ...]

    @property
    def label(self) -> str:
        """E.g. ``"modality_parallel: vision 1, llm 5; 6 ranks, zero_bubble"``; of modules with
        degrees, ``"llm 2 (tp 4) x3"``: three copies of two stages of four processes."""
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
    """Stages of a module and how it is shared, e.g. ``"2 (tp 4) x3"``."""
    chains = plan.replicas(module)
    within = rank_text(chains[0][0].degrees)
    return (
        f"{len(chains[0])}" + (f" ({within})" if within else "")
        + (f" x{len(chains)}" if len(chains) > 1 else "")
    )


def places_text(plan: Plan) -> str:
    """E.g. ``"6 ranks"``, or ``"6 ranks, 24 devices"`` where some are several processes."""
    text = f"{plan.num_ranks} ranks"
    return text if plan.num_processes == plan.num_ranks else f"{text}, {plan.num_processes} devices"


@dataclass(frozen=True)
class Proposal:
    """What a planner found.

    Attributes:
        options: judged plans that fit, fastest first.
        refused: (label, reason) of plans that do not.
        bound: seconds that no schedule of the best plan undercuts.
        combinations, simulated: stage counts there were, and how many were simulated.
    """

    options: tuple[Option, ...]
    refused: tuple[tuple[str, str], ...]
    bound: float
    combinations: int
    simulated: int

    @property
    def best(self) -> Option:
        return self.options[0]


def fastest_first(options: Iterable[Option]) -> tuple[Option, ...]:
    """Of equally fast ones, those with fewer devices first."""
    return tuple(sorted(options, key=lambda option: (option.seconds, option.plan.num_processes)))


def step_timeline(plan: Plan, network: Network, program: Program | None = None) -> Timeline:
    """A plan's step, simulated with messages.

    Args:
        plan: with a profile.
        network: the links.
        program: by default the one that the trainer makes of the plan for a step with every
            modality in every microbatch. It does not know how long messages take, so neither
            does its order of work.
    """
    program = full_program(plan) if program is None else program
    return simulate(program, op_seconds(plan), transfers=network.transfers(plan))


def step_bound(plan: Plan, network: Network) -> float:
    """Seconds that no schedule of the plan undercuts."""
    return lower_bound(plan, network.delays(plan))


def evaluate(plan: Plan, network: Network, layout: str = "") -> tuple[Option, str | None]:
    """A plan with a profile, judged; and why it does not fit in memory, if it does not.

    The option's plan has the policy that was found for its schedule.
    """
    plan, _ = refine(plan, network.delays(plan))
    program = full_program(plan)
    seconds = step_timeline(plan, network, program).makespan
    return Option(layout, plan, seconds, rank_memory(plan, program)), _too_full(plan, program)


def _too_full(plan: Plan, program: Program) -> str | None:
    try:
        check_memory(plan, program)
    except PlanError as error:
        return str(error)
    return None


class Candidates:
    """The plans that a planner comes up with, judged.

    Args:
        network: the links.
        schedules: those that :meth:`add_schedules` tries.

    Attributes:
        options, refused: as of :class:`Proposal`, in the order they came.
    """

    def __init__(self, network: Network, schedules: Sequence[str]) -> None:
        self.network = network
        self.schedules = schedules
        self.options: list[Option] = []
        self.refused: list[tuple[str, str]] = []
        self._combinations = self._simulated = 0

    def seconds(self, plan: Plan) -> float:
        """Of a step, as options are judged; for searches."""
        if not any(transfer.total for transfer in self.network.transfers(plan).values()):
            return iteration_time(plan)
        return step_timeline(plan, self.network).makespan

    def bound(self, plan: Plan) -> float:
        """:func:`step_bound`, for searches."""
        return step_bound(plan, self.network)

    def fits(self, plan: Plan) -> bool:
        """Whether a plan fits in memory, for searches."""
        return plan.memory_limit is None or _too_full(plan, full_program(plan)) is None

    def count(self, found: SearchResult) -> None:
        """Take note of how much a search looked at."""
        self._combinations += found.combinations
        self._simulated += found.simulated

    def add(self, layout: str, plan: Plan) -> None:
        """Judge a plan and keep it, among the options or the refused."""
        option, reason = evaluate(plan, self.network, layout)
        if reason is None:
            self.options.append(option)
        else:
            self.refused.append((option.label, reason))

    def add_schedules(self, layout: str, plan: Plan) -> None:
        """:meth:`add` a plan with every schedule that it can have."""
        for schedule in self.schedules:
            # Both halves of a backward that is split would make activations again.
            if schedule != "zero_bubble" or not any(s.layer_options for s in plan.stages):
                self.add(layout, replace(plan, schedule=schedule))

    def proposal(self) -> Proposal:
        """All that was added.

        Raises:
            StageSearchError: if nothing fits.
        """
        if not self.options:
            reasons = "; ".join(f"{label}: {why}" for label, why in self.refused)
            raise StageSearchError(f"no plan fits: {reasons or 'there is none for this model'}")
        options = fastest_first(self.options)
        return Proposal(
            options, tuple(self.refused), self.bound(options[0].plan),
            self._combinations, self._simulated,
        )
