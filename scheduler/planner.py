"""The planner: from a model's costs and a number of ranks to the plan to run.

It searches stage counts exactly under 1F1B (:func:`~raymm.scheduler.stage_search.joint_search`),
then tries the best of them with better schedules and several chunks per rank, and the other
layouts; everything is judged by simulated iteration time with messages, within the memory
limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from raymm.scheduler.bounds import lower_bound
from raymm.scheduler.costs import CostProfile
from raymm.scheduler.devices import Link
from raymm.scheduler.graph import ModuleGraph
from raymm.scheduler.layouts import chunked, colocated, replicated
from raymm.scheduler.lower import full_program, iteration_time, settle
from raymm.scheduler.memory import RankMemory, check_memory, rank_memory
from raymm.scheduler.network import Transfer, delays, edge_transfers
from raymm.scheduler.partition import cost_matrix
from raymm.scheduler.plan import SCHEDULES, Plan, PlanError
from raymm.scheduler.program import Program
from raymm.scheduler.simulate import simulate
from raymm.scheduler.stage_costs import op_seconds
from raymm.scheduler.stage_search import SearchResult, joint_search
from raymm.scheduler.stage_space import StageSearchError, StageSpace

LAYOUTS = ("modality_parallel", "colocated", "replicated")
SEARCHED_SCHEDULES = ("1f1b", "zero_bubble")
CHUNKS = (2, 3, 4)
# Plans of the stage search that are tried with every schedule.
FINALISTS = 3


@dataclass(frozen=True)
class Network:
    """The links between ranks; ranks fill nodes in order. Messages take no time by default."""

    within_node: Link = Link(0.0, float("inf"))
    across_nodes: Link = Link(0.0, float("inf"))
    ranks_per_node: int = 1_000_000

    def transfers(self, plan: Plan) -> dict[tuple[str, str], Transfer]:
        """What a message takes, per directed edge."""
        return edge_transfers(plan, self.within_node, self.across_nodes, self.ranks_per_node)

    def delays(self, plan: Plan) -> dict[tuple[str, str], float]:
        """Seconds of a message per directed edge, if its link is free."""
        return delays(self.transfers(plan))


@dataclass(frozen=True)
class Option:
    """One plan that was judged.

    Attributes:
        layout: one of :data:`LAYOUTS`, with the chunks per rank if there are several.
        plan: the plan.
        seconds: simulated seconds of an iteration: of the program that ``lower(plan)`` gives,
            with messages.
        memory: bytes per rank.
    """

    layout: str
    plan: Plan
    seconds: float
    memory: tuple[RankMemory, ...]

    @property
    def label(self) -> str:
        """E.g. ``"modality_parallel: vision 1, llm 5; 6 ranks, zero_bubble"``."""
        counts = ", ".join(
            f"{node.name} {len(self.plan.replicas(node.name)[0])}"
            + (f" x{n}" if (n := len(self.plan.replicas(node.name))) > 1 else "")
            for node in self.plan.graph.nodes
        )
        how = self.plan.schedule
        if any(stage.recompute for stage in self.plan.stages):
            how += ", recomputing"
        return f"{self.layout}: {counts}; {self.plan.num_ranks} ranks, {how}"


@dataclass(frozen=True)
class Proposal:
    """What the planner found.

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


def propose(
    graph: ModuleGraph,
    profile: CostProfile,
    ranks: int,
    num_microbatches: int,
    *,
    memory_limit: int | None = None,
    network: Network | None = None,
    recompute: bool | None = None,
    schedules: Sequence[str] = SEARCHED_SCHEDULES,
    layouts: Sequence[str] = LAYOUTS,
    chunks: Sequence[int] = CHUNKS,
) -> Proposal:
    """Plan a model.

    Args:
        graph, profile: the model and what its layers cost.
        ranks: how many ranks there are; a plan may use fewer.
        num_microbatches: microbatches per step.
        memory_limit: bytes per rank; no limit if None.
        network: what messages take.
        recompute: whether stages recompute; if None, a layout does only if it does not fit
            otherwise.
        schedules: of ``"1f1b"``, ``"zero_bubble"`` and ``"gpipe"``.
        layouts: of :data:`LAYOUTS`.
        chunks: stages of a module per rank that are tried besides one.

    Raises:
        StageSearchError: if nothing fits.
        ProfileError: if the profile is not of this graph.
        ValueError: on an unknown layout or schedule, none at all, or a number that is none.
    """
    _check_number("ranks", ranks)
    _check_number("num_microbatches", num_microbatches)
    if memory_limit is not None:
        _check_number("memory_limit", memory_limit)
    _check_choices("layouts", layouts, LAYOUTS)
    _check_choices("schedules", schedules, SCHEDULES)
    if any(type(many) is not int or many < 2 for many in chunks):
        raise ValueError(f"chunks is {tuple(chunks)}; each must be a whole number, at least 2")
    planners: list[_Planner] = []
    left = tuple(layouts)
    for again in (False, True) if recompute is None else (recompute,):
        space = StageSpace(
            graph, profile, ranks, num_microbatches, recompute=again, memory_limit=memory_limit
        )
        if memory_limit is not None:
            space = replace(space, feasible=_Feasible(space, memory_limit))
        planners.append(_Planner(space, network or Network(), schedules, left, chunks))
        left = planners[-1].run()
        if not left or memory_limit is None:
            break
    return _proposal(planners)


def _check_number(field: str, value: int) -> None:
    # Plan files know whole numbers only, so a plan must not be made with another one.
    if type(value) is not int or value < 1:
        raise ValueError(f"{field} is {value!r}; it must be a whole number, at least 1")


def _check_choices(field: str, chosen: Sequence[str], accepted: Sequence[str]) -> None:
    for name in chosen:
        if name not in accepted:
            raise ValueError(f"{field} has {name!r}; accepted: {', '.join(accepted)}")
    if not chosen:
        raise ValueError(f"{field} is empty; accepted: {', '.join(accepted)}")


def _proposal(planners: Sequence[_Planner]) -> Proposal:
    options = [option for planner in planners for option in planner.options]
    refused = tuple(entry for planner in planners for entry in planner.refused)
    if not options:
        reasons = "; ".join(f"{label}: {why}" for label, why in refused)
        raise StageSearchError(f"no plan fits: {reasons}")
    options.sort(key=lambda option: (option.seconds, option.plan.num_ranks))
    best = options[0].plan
    searches = [planner.found for planner in planners if planner.found]
    return Proposal(
        tuple(options), refused, lower_bound(best, planners[0].network.delays(best)),
        sum(found.combinations for found in searches), sum(found.simulated for found in searches),
    )


class _Planner:
    """One round of planning, with or without recomputation."""

    def __init__(
        self,
        space: StageSpace,
        network: Network,
        schedules: Sequence[str],
        layouts: Sequence[str],
        chunks: Sequence[int],
    ) -> None:
        self.space = space
        self.network = network
        self.schedules = schedules
        self.layouts = layouts
        self.chunks = chunks
        self.options: list[Option] = []
        self.refused: list[tuple[str, str]] = []
        self.found: SearchResult | None = None

    def run(self) -> tuple[str, ...]:
        """Fill in what was found; returns the layouts of which no plan fits."""
        left = []
        for layout in self.layouts:
            before = len(self.options)
            if layout == "modality_parallel":
                self._try_modality_parallel()
            else:
                self._try_shared(layout)
            if len(self.options) == before:
                left.append(layout)
        return tuple(left)

    def _try_modality_parallel(self) -> None:
        try:
            self.found = joint_search(
                self.space,
                self._seconds,
                lambda plan: lower_bound(plan, self.network.delays(plan)),
                self._fits,
                alternatives=FINALISTS - 1,
            )
        except StageSearchError as error:  # other layouts may need less memory
            again = ", recomputing" if self.space.recompute else ""
            self.refused.append((f"modality_parallel{again}", str(error)))
            return
        for choice in (self.found.best, *self.found.alternatives):
            self._try_schedules("modality_parallel", choice.plan)
        self._try_chunks(self.found.best.counts)

    def _seconds(self, plan: Plan, program: Program | None = None) -> float:
        """Of the program that the trainer will make of the plan. It does not know how long
        messages take, so neither does its order of work."""
        transfers = self.network.transfers(plan)
        if program is None and not any(t.total for t in transfers.values()):
            return iteration_time(plan)
        program = full_program(plan) if program is None else program
        return simulate(program, op_seconds(plan), transfers=transfers).makespan

    def _fits(self, plan: Plan) -> bool:
        return self.space.memory_limit is None or _too_full(plan, full_program(plan)) is None

    def _try_schedules(self, layout: str, plan: Plan) -> None:
        for schedule in self.schedules:
            self._judge(layout, replace(plan, schedule=schedule))

    def _try_chunks(self, counts: dict[str, int]) -> None:
        if "zero_bubble" not in self.schedules:
            return
        for many in self.chunks:
            try:
                plan = chunked(self.space, counts, many)
            except StageSearchError:
                continue
            self._judge(f"modality_parallel, {many} chunks per rank",
                        replace(plan, schedule="zero_bubble"))

    def _try_shared(self, layout: str) -> None:
        """Layouts in which modules share ranks: of those that fit the one that is fastest
        under 1F1B, or else the fastest, to say why it does not fit."""
        plans, reason = [], f"it needs at least 2 ranks; ranks is {self.space.ranks}"
        for make in self._makers(layout):
            try:
                plans.append(make())
            except StageSearchError as error:  # this one does not exist for the model
                reason = str(error)
        if not plans:
            self.refused.append((layout, reason))
            return
        plans = [plan for plan in plans if self._fits(plan)] or plans
        times = [self._seconds(plan) for plan in plans]
        self._try_schedules(layout, plans[times.index(min(times))])

    def _makers(self, layout: str) -> list[Callable[[], Plan]]:
        space, ranks, sink = self.space, self.space.ranks, self.space.graph.sink
        most = space.graph.node(sink).num_layers  # stages of the sink, however many ranks
        if layout == "replicated":
            return [partial(replicated, space, min(ranks, most))]
        longest = max((n.num_layers for n in space.graph.nodes if n.name != sink), default=1)
        return [
            partial(colocated, space, first, min(ranks - first, most))
            for first in range(1, min(longest, ranks - 1) + 1)
        ]

    def _judge(self, layout: str, plan: Plan) -> None:
        plan, _ = settle(plan, self.network.delays(plan))
        program = full_program(plan)
        memory = rank_memory(plan, program)
        option = Option(layout, plan, self._seconds(plan, program), memory)
        if reason := _too_full(plan, program):
            self.refused.append((option.label, reason))
        else:
            self.options.append(option)


def _too_full(plan: Plan, program: Program) -> str | None:
    try:
        check_memory(plan, program)
    except PlanError as error:
        return str(error)
    return None


class _Feasible:
    """Which stages fit in memory under 1F1B, by their place in the pipeline: what
    :attr:`StageSpace.feasible` takes."""

    def __init__(self, space: StageSpace, limit: int) -> None:
        self.space = space
        self.limit = limit

    def __call__(self, module: str, stages: int, beyond: int) -> np.ndarray:
        space, graph = self.space, self.space.graph
        node, costs = graph.node(module), space.profile.modules[module]
        backward = space.backward[module]
        state = cost_matrix([
            space.profile.state_bytes(c, trainable)
            for c, trainable in zip(costs, node.trainable, strict=True)
        ])
        kept = cost_matrix([
            c.activation_bytes if b else 0 for c, b in zip(costs, backward, strict=True)
        ])
        first = sum(space.profile.modules[p][-1].output_bytes for p in graph.producers(module))
        received = np.array([first, *(c.output_bytes for c in costs)], dtype=float)[:, None]
        again = space.recomputing[module]
        fits = np.empty((stages, *state.shape), dtype=bool)
        for index in range(stages):
            live = min(stages - index + beyond, space.num_microbatches)
            needed = np.where(again, live * received + kept, live * kept)
            fits[index] = state + needed <= self.limit
        return fits
