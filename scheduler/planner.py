"""The planner: from a model's costs and a number of ranks to the plan to run.

It searches stage counts exactly under 1F1B (:func:`~raymm.scheduler.stage_search.joint_search`),
then tries the best of them with better schedules and several chunks per rank, and the other
layouts; everything is judged by simulated iteration time with messages, within the memory
limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from raymm.scheduler.bounds import lower_bound
from raymm.scheduler.costs import TRAINED_COPIES, CostProfile
from raymm.scheduler.devices import Link
from raymm.scheduler.graph import ModuleGraph
from raymm.scheduler.layouts import chunked, colocated, replicated
from raymm.scheduler.lower import iteration_time, lower, settle
from raymm.scheduler.memory import RankMemory, check_memory, rank_memory
from raymm.scheduler.network import delays, edge_transfers
from raymm.scheduler.partition import cost_matrix
from raymm.scheduler.plan import Plan, PlanError
from raymm.scheduler.program import Program
from raymm.scheduler.stage_search import joint_search
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

    def delays(self, plan: Plan) -> dict[tuple[str, str], float]:
        """Seconds of a message per directed edge."""
        return delays(
            edge_transfers(plan, self.within_node, self.across_nodes, self.ranks_per_node)
        )


@dataclass(frozen=True)
class Option:
    """One plan that was judged.

    Attributes:
        layout: one of :data:`LAYOUTS`, with the chunks per rank if there are several.
        plan: the plan.
        seconds: simulated seconds of an iteration.
        memory: bytes per rank.
    """

    layout: str
    plan: Plan
    seconds: float
    memory: tuple[RankMemory, ...]

    @property
    def label(self) -> str:
        """E.g. ``"modality_parallel vision 1, llm 5 (7 ranks), zero_bubble"``."""
        counts = ", ".join(
            f"{node.name} {len(self.plan.replicas(node.name)[0])}"
            + (f" x{n}" if (n := len(self.plan.replicas(node.name))) > 1 else "")
            for node in self.plan.graph.nodes
        )
        return f"{self.layout}: {counts}; {self.plan.num_ranks} ranks, {self.plan.schedule}"


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
        recompute: whether stages recompute; if None, only when nothing fits otherwise.
        schedules: of ``"1f1b"``, ``"zero_bubble"`` and ``"gpipe"``.
        layouts: of :data:`LAYOUTS`.
        chunks: stages of a module per rank that are tried besides one.

    Raises:
        StageSearchError: if nothing fits.
        ValueError: on an unknown layout or schedule.
    """
    for name in layouts:
        if name not in LAYOUTS:
            raise ValueError(f"layouts has {name!r}; accepted: {', '.join(LAYOUTS)}")
    error: StageSearchError | None = None
    for again in (False, True) if recompute is None else (recompute,):
        space = StageSpace(
            graph, profile, ranks, num_microbatches, recompute=again, memory_limit=memory_limit
        )
        if memory_limit is not None:
            space = replace(space, feasible=_Feasible(space, memory_limit))
        planner = _Planner(space, network or Network(), schedules, layouts, chunks)
        try:
            return planner.run()
        except StageSearchError as found:
            error = found
    raise error


class _Planner:
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

    def run(self) -> Proposal:
        found = None
        if "modality_parallel" in self.layouts:
            found = joint_search(
                self.space,
                lambda plan: iteration_time(plan, delays=self.network.delays(plan)),
                lambda plan: lower_bound(plan, self.network.delays(plan)),
                self._fits,
                alternatives=FINALISTS - 1,
            )
            for choice in (found.best, *found.alternatives):
                self._try_schedules("modality_parallel", choice.plan)
            self._try_chunks(found.best.counts)
        self._try_other_layouts()
        if not self.options:
            reasons = "; ".join(f"{label}: {why}" for label, why in self.refused) or "no layout"
            raise StageSearchError(f"no plan fits: {reasons}")
        self.options.sort(key=lambda option: (option.seconds, option.plan.num_ranks))
        best = self.options[0].plan
        return Proposal(
            tuple(self.options), tuple(self.refused),
            lower_bound(best, self.network.delays(best)),
            found.combinations if found else 0, found.simulated if found else 0,
        )

    def _fits(self, plan: Plan) -> bool:
        return self.space.memory_limit is None or _too_full(plan, _program(plan)) is None

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
            # As much memory as the plan with one chunk takes, unless a limit says otherwise.
            self._judge(f"modality_parallel, {many} chunks per rank",
                        replace(plan, schedule="zero_bubble"))

    def _try_other_layouts(self) -> None:
        for layout in self.layouts:
            plans = [] if layout == "modality_parallel" else list(self._made(layout))
            if plans:
                times = [iteration_time(p, delays=self.network.delays(p)) for p in plans]
                self._try_schedules(layout, plans[times.index(min(times))])

    def _made(self, layout: str) -> Iterator[Plan]:
        space, ranks = self.space, self.space.ranks
        makers = [partial(replicated, space, ranks)]
        if layout == "colocated":
            makers = [partial(colocated, space, n, ranks - n) for n in range(1, ranks)]
        for make in makers:
            with suppress(StageSearchError):  # this one does not exist for the model
                yield make()

    def _judge(self, layout: str, plan: Plan) -> None:
        waits = self.network.delays(plan)
        plan, seconds = settle(plan, waits)
        program = _program(plan)
        option = Option(layout, plan, seconds, rank_memory(plan, program))
        if reason := _too_full(plan, program):
            self.refused.append((option.label, reason))
        else:
            self.options.append(option)


def _program(plan: Plan) -> Program:
    return lower(plan, [[node.name for node in plan.graph.nodes]] * plan.num_microbatches)


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
        frozen = space.profile.frozen_share
        state = cost_matrix([
            c.parameter_bytes * (TRAINED_COPIES if trainable else frozen)
            for c, trainable in zip(costs, node.trainable, strict=True)
        ])
        kept = cost_matrix([
            c.activation_bytes if b else 0 for c, b in zip(costs, backward, strict=True)
        ])
        first = sum(space.profile.modules[p][-1].output_bytes for p in graph.producers(module))
        received = np.array([first, *(c.output_bytes for c in costs)], dtype=float)[:, None]
        again = np.array([*(all(backward[lo:]) for lo in range(len(costs))), False])[:, None]
        again = np.broadcast_to(again & space.recompute, state.shape).copy()
        if module == graph.sink and not space.recompute_loss:
            again[:, len(costs)] = False
        fits = np.empty((stages, *state.shape), dtype=bool)
        for index in range(stages):
            live = min(stages - index + beyond, space.num_microbatches)
            needed = np.where(again, live * received + kept, live * kept)
            fits[index] = state + needed <= self.limit
        return fits
