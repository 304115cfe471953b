"""Exact dynamic programming for the best sequence of stages.

A state is a set of finished modules that is closed under dependencies (a downset); a stage is any
non-empty set of ready modules, so every legal sequence is a path. The cost of a stage starts as a
lower bound, and stages are solved only when they are on the best path. Once all stages of that path
are solved, it is optimal (lazy shortest path).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from raymm.errors import NoPlanError
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage
from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.solver.stage_evaluation import ROUNDING, StageEvaluator

# Factor of the effort for a stage each time its result is not exact.
REFINEMENT = 8


@dataclass(frozen=True)
class Effort:
    """Limits of a search, in counts of work instead of seconds, so that results are reproducible.

    Attributes:
        transitions: most transitions between states of the dynamic program.
        stages: most stages of the partition program.
        nodes: most placements that one search within a stage tries.
        searches: most searches within stages for the dynamic program; beyond, its result may be
            unproven.
        rounds: most rounds of bounding and solving of the partition program.
        tries: number of searches within stages after which the local search does not restart.
        branches: most restricted problems to solve if memory over the iteration is short.
    """

    transitions: int
    stages: int
    nodes: int
    searches: int
    rounds: int
    kicks: int
    tries: int
    branches: int = 24


class StateGraph:
    """Downsets of the modules ``within`` and the stages that lead from one to another. Raises
    ``NoPlanError`` for more than ``limit`` transitions.

    Attributes:
        states: (D,) downsets, by number of modules, starting with the empty one.
        source, target: (E,) indices of states, ordered by source.
        stage: (E,) modules of the transition.
    """

    def __init__(self, evaluator: StageEvaluator, within: int, limit: int) -> None:
        problem = evaluator.problem
        modules = list(bits(within))
        ancestors = {m: problem.ancestors[m] & within for m in modules}
        # Without dependencies, any order of stages is legal: use only the order of their first
        # modules.
        ordered = not any(ancestors.values())
        layer, states, sources, stages = {0}, [], [], []
        count = 0
        while layer:
            following: set[int] = set()
            for state in sorted(layer):
                ready = sum(
                    1 << m for m in modules if not state >> m & 1 and not ancestors[m] & ~state
                )
                subsets = _subsets(ready, ordered)
                count += len(subsets)
                if count > limit:
                    raise NoPlanError(f"more than {limit} transitions between states")
                states.append(state)
                stages.append(subsets)
                following.update((subsets | state).tolist())
            layer = following
            # A layer is reached by one more stage, not by one more module.
            layer -= set(states)
        order = sorted(range(len(states)), key=lambda i: (states[i].bit_count(), states[i]))
        self.states = np.array([states[i] for i in order], np.int64)
        self.stage = np.concatenate([stages[i] for i in order])
        sources = np.repeat(np.arange(len(order)), [len(stages[i]) for i in order])
        self.source = sources
        by_value = np.argsort(self.states)
        needed = self.states[self.source] | self.stage
        self.target = by_value[np.searchsorted(self.states, needed, sorter=by_value)]
        self.size = np.array([int(s).bit_count() for s in self.states])

    def keep(self, which: np.ndarray) -> None:
        self.source, self.target = self.source[which], self.target[which]
        self.stage = self.stage[which]

    def to_end(self, cost: np.ndarray) -> np.ndarray:
        """Return the (D,) least cost from each state to the last; ``cost`` is (E,)."""
        least = np.full(len(self.states), np.inf)
        least[-1] = 0.0
        # Sources of a layer have the same size, so their targets are processed before them.
        edges = np.searchsorted(self.size[self.source], np.arange(self.size[-1] + 1))
        for k in range(self.size[-1] - 1, -1, -1):
            outgoing = slice(edges[k], edges[k + 1])
            if outgoing.start == outgoing.stop:
                continue
            sources = self.source[outgoing]
            first = np.flatnonzero(np.diff(sources, prepend=-1))
            least[sources[first]] = np.minimum.reduceat(
                cost[outgoing] + least[self.target[outgoing]], first
            )
        return least

    def from_start(self, cost: np.ndarray) -> np.ndarray:
        """Return the (D,) least cost from the first state to each."""
        least = np.full(len(self.states), np.inf)
        least[0] = 0.0
        edges = np.searchsorted(self.size[self.source], np.arange(self.size[-1] + 1))
        for k in range(self.size[-1]):
            outgoing = slice(edges[k], edges[k + 1])
            np.minimum.at(
                least, self.target[outgoing], cost[outgoing] + least[self.source[outgoing]]
            )
        return least

    def path(self, cost: np.ndarray, to_end: np.ndarray) -> list[int]:
        result, state = [], 0
        while state != len(self.states) - 1:
            first, last = np.searchsorted(self.source, [state, state + 1])
            edge = first + int(np.argmin(cost[first:last] + to_end[self.target[first:last]]))
            result.append(edge)
            state = int(self.target[edge])
        return result


@njit(cache=True)
def _subsets(modules: int, with_first: bool) -> np.ndarray:
    """Return the non-empty subsets, ascending; with ``with_first`` only those with the lowest
    member."""
    first = modules & -modules if with_first else 0
    optional = modules & ~first
    count, remaining = 1, optional
    while remaining:
        count *= 2
        remaining &= remaining - 1
    result = np.empty(count, np.int64)
    subset = 0
    for i in range(count):
        result[i] = subset | first
        subset = (subset - optional) & optional
    return result if first else result[1:]


def best_sequence(
    evaluator: StageEvaluator, within: int, start: list[int], effort: Effort,
    better: Callable[[list[int]], None], proven: Callable[[float], None],
) -> tuple[list[int], float]:
    """Return the best stages found for the modules ``within``, and a lower bound of the seconds.
    Raise ``NoPlanError`` if there are more than ``effort.transitions`` transitions.

    Args:
        evaluator: evaluates stages; its ``nodes`` is the initial effort per stage.
        start: initial sets of modules, in order.
        effort: stages that are not exact after ``nodes`` count with their bound, and the result may
            be unproven.
        better, proven: called with every better sequence and every higher bound.
    """
    graph = StateGraph(evaluator, within, effort.transitions)
    upper, best = total_seconds(evaluator, start), list(start)
    distinct, inverse = np.unique(graph.stage, return_inverse=True)
    cost = evaluator.bounds.bounds(distinct)
    for stage, result in evaluator.results.items():
        index = int(np.searchsorted(distinct, stage))
        if index < len(distinct) and distinct[index] == stage:
            cost[index] = max(cost[index], result.bound)
    pruned_at, last = np.inf, evaluator.searches + effort.searches
    while True:
        edge_cost = cost[inverse]
        to_end = graph.to_end(edge_cost)
        lower = float(to_end[0])
        if not lower < upper * (1 - ROUNDING):
            proven(upper)
            return best, upper
        proven(lower)
        if upper < pruned_at:
            least = graph.from_start(edge_cost)[graph.source] + edge_cost + to_end[graph.target]
            keep = least < upper * (1 - ROUNDING)
            graph.keep(keep)
            inverse, edge_cost = inverse[keep], edge_cost[keep]
            pruned_at = upper
        path = graph.path(edge_cost, to_end)
        progress = dead = False
        for index in path:
            stage, least_known = int(graph.stage[index]), float(cost[inverse[index]])
            # The path is useful only if this stage takes less than this.
            outcome = evaluator.probe(stage, (least_known + upper - lower) * (1 - ROUNDING))
            if outcome.bound > least_known * (1 + ROUNDING):
                cost[inverse[index]], progress = outcome.bound, True
                dead = dead or outcome.bound >= (least_known + upper - lower) * (1 - ROUNDING)
        if dead and evaluator.searches <= last:
            continue
        for index in path:
            stage = int(graph.stage[index])
            seen = stage in evaluator.results
            result = evaluator.result(stage)
            if seen and not result.exact and result.nodes < effort.nodes:
                result = evaluator.refined(stage, min(effort.nodes, result.nodes * REFINEMENT))
                seen = False
            progress |= not seen
            cost[inverse[index]] = max(cost[inverse[index]], result.bound)
        sequence = [int(graph.stage[index]) for index in path]
        seconds = total_seconds(evaluator, sequence)
        if seconds < upper * (1 - ROUNDING):
            upper, best = seconds, sequence
            better(sequence)
        if not progress or evaluator.searches > last:
            return best, lower


def in_order(problem: MappingProblem, stages: Sequence[int]) -> list[int] | None:
    """Return the stages (sets of modules) in an order that meets every dependency; None if there is
    none."""
    result: list[int] = []
    waiting, done = list(stages), 0
    while waiting:
        for stage in waiting:
            ancestors = 0
            for m in bits(stage):
                ancestors |= problem.ancestors[m]
            if not ancestors & ~done:
                result.append(stage)
                waiting.remove(stage)
                done |= stage
                break
        else:
            return None
    return result


def in_order_within(problem: MappingProblem, stages: list[int], within: int | None) -> list[int]:
    """Return stages in order; modules outside ``within`` count as done."""
    if within is None:
        return in_order(problem, stages) or []
    outside = [1 << m for m in range(len(problem.names)) if not within >> m & 1]
    sources = [s for s in outside if not _depends(problem, s, within)]
    ordered = in_order(
        problem, [*sources, *stages, *(s for s in outside if s not in sources)]
    ) or []
    return [stage for stage in ordered if stage in stages]


def alone_in_slot(problem: MappingProblem, within: int | None = None) -> list[int]:
    """Return one stage per module (of ``within``), in topological order (Algorithm 1, line 3)."""
    stages = in_order(problem, [1 << m for m in range(len(problem.names))]) or []
    return [stage for stage in stages if within is None or stage & within]


def components(problem: MappingProblem) -> list[int]:
    """Split the modules into parts where each part depends on all earlier parts, and none depends
    on later ones. No stage has modules of two parts, so each part is mapped separately."""
    ordered: list[int] = []
    all_modules, done, component = (1 << len(problem.names)) - 1, 0, 0
    for stage in alone_in_slot(problem):
        component |= stage
        remaining = all_modules & ~done & ~component
        if all(not component & ~problem.ancestors[m] for m in bits(remaining)):
            ordered.append(component)
            done |= component
            component = 0
    return ordered


def total_seconds(evaluator: StageEvaluator, stages: Sequence[int]) -> float:
    return sum(evaluator.result(stage).seconds for stage in stages)


def mapping_of(
    evaluator: StageEvaluator, stages: Sequence[int], bound: float, method: str
) -> Mapping:
    """Return a mapping of the stages (sets of modules as bits) with the best known placements."""
    problem = evaluator.problem
    mapped = tuple(
        MultiplexStage(evaluator.result(stage).placements, evaluator.result(stage).seconds)
        for stage in stages
    )
    return Mapping(problem.gpus, problem.steps, mapped, max(0.0, bound), method)


def _depends(problem: MappingProblem, stage: int, on: int) -> bool:
    return any(problem.ancestors[m] & on for m in bits(stage))
