"""Exact search for the best stages of a mapping, in two ways.

:func:`best_sequence` is a dynamic program. A state is a set of finished modules that is closed
under dependencies (a downset); a stage is any non-empty set of ready modules, so every legal
sequence is a path. The cost of a stage starts as a lower bound, and stages are solved only when
they are on the best path. Once all stages of that path are solved, it is optimal (lazy shortest
path).

:func:`best_partition` serves modules with hardly any dependencies. With n independent modules there
are 2^n stages and far more sequences. Any mapping is a partition of the modules into stages, so the
linear program over all stages (set partitioning) gives a lower bound, even without dependencies.
Columns are priced over all stages at once, with lower bounds as cost, and only stages in its
solution are solved. Stages whose reduced cost exceeds the gap between the bounds are in no better
partition; CP-SAT chooses among the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from ortools.linear_solver import pywraplp
from ortools.sat.python import cp_model

from raymm.errors import NoPlanError
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage
from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.solver.stage_evaluation import ROUNDING, StageEvaluator

# Factor of the effort for a stage each time its result is not exact.
REFINEMENT = 8
# Columns added to the linear program at once, and candidates whose bounds are tightened for that.
PRICED = 40
TIGHTENED = 20_000
# Most stages for one CP-SAT model, its deterministic time limit, and the unit of its integers.
MOST_CHOICES = 3_000
CHOICE_WORK = 2.0
UNITS = 10**9
USED = 1e-6
CHUNK_BITS = 10


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
    others = [m for m in range(len(problem.names)) if not within >> m & 1]
    outside = [1 << m for m in others]
    sources = [1 << m for m in others if not problem.ancestors[m] & within]
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


def independent_sets(problem: MappingProblem, within: int, limit: int) -> np.ndarray:
    """Return all (N,) non-empty sets of modules of ``within`` that may share a stage; raise
    ``NoPlanError`` if there are more than ``limit``."""
    result = np.zeros(1, np.int64)
    for m in bits(within):
        extended = result[(result & problem.related[m]) == 0] | (1 << m)
        if len(result) + len(extended) > limit:
            raise NoPlanError(f"more than {limit} sets of modules may share a stage")
        result = np.concatenate([result, extended])
    return result[1:]


class _Columns:
    """All stages of some modules, with lower bounds of their cost."""

    def __init__(self, evaluator: StageEvaluator, within: int, limit: int) -> None:
        self.evaluator = evaluator
        self.modules = list(bits(within))
        self.stages = np.sort(independent_sets(evaluator.problem, within, limit))
        # From quota alone; the tighter bounds are computed on demand.
        self.cost = evaluator.bounds.bounds(self.stages, 1)
        self.tight = np.zeros(len(self.stages), np.bool_)
        seen = [stage for stage in evaluator.results if not stage & ~within]
        for stage in self.stages[[self.at(s) for s in seen]]:
            self.update(int(stage))
        rows = len(evaluator.problem.names)
        self._parts = [
            (self.stages >> first & ((1 << CHUNK_BITS) - 1)).astype(np.int16)
            for first in range(0, rows, CHUNK_BITS)
        ]

    def at(self, stage: int) -> int:
        return int(np.searchsorted(self.stages, stage))

    def update(self, stage: int) -> None:
        index = self.at(stage)
        self.cost[index] = max(self.cost[index], self.evaluator.known_bound(stage))

    def tighten(self, which: np.ndarray) -> np.ndarray:
        """Compute tighter bounds of some stages, by index; return the (n,) increases."""
        result = np.zeros(len(which))
        new = np.flatnonzero(~self.tight[which] & np.isfinite(self.cost[which]))
        indices = which[new]
        self.tight[which] = True
        better = np.maximum(self.cost[indices], self.evaluator.bounds.bounds(self.stages[indices]))
        result[new] = better - self.cost[indices]
        self.cost[indices] = better
        return result

    def sums(self, duals: np.ndarray) -> np.ndarray:
        """Return the (N,) sum of the (M,) duals of its modules, for every stage."""
        total = np.zeros(len(self.stages))
        for c, chunk in enumerate(self._parts):
            table = np.zeros(1)
            for value in duals[c * CHUNK_BITS : (c + 1) * CHUNK_BITS]:
                table = np.concatenate([table, table + value])
            total += table[chunk]
        return total


class _Program:
    """Linear program over some of the stages."""

    def __init__(self, columns: _Columns, chosen: list[int]) -> None:
        self.columns = columns
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.rows = {m: self.solver.Constraint(1.0, 1.0) for m in columns.modules}
        self.variables: dict[int, pywraplp.Variable] = {}
        self.solver.Objective().SetMinimization()
        self.add(chosen)

    def add(self, chosen: list[int]) -> None:
        for index in chosen:
            if index in self.variables or not np.isfinite(self.columns.cost[index]):
                continue
            self.columns.tighten(np.array([index]))
            variable = self.variables[index] = self.solver.NumVar(0.0, self.solver.infinity(), "")
            for m in bits(int(self.columns.stages[index])):
                self.rows[m].SetCoefficient(variable, 1.0)

    def solve(self) -> tuple[float, np.ndarray, list[int]]:
        """Add stages until none has a negative reduced cost; return the bound, the (N,) reduced
        costs, and the stages in use."""
        count = len(self.columns.evaluator.problem.names)
        while True:
            for index, variable in self.variables.items():
                self.solver.Objective().SetCoefficient(variable, float(self.columns.cost[index]))
            self.solver.Solve()
            duals = np.zeros(count)
            for m, row in self.rows.items():
                duals[m] = row.dual_value()
            value = float(duals.sum())
            reduced = self.columns.cost - self.columns.sums(duals)
            new = self._negative(reduced, -ROUNDING * value)
            worst = float(reduced.min())
            if not new:
                used = [index for index, x in self.variables.items() if x.solution_value() > USED]
                # There are at most as many stages as modules, each with at least the worst reduced
                # cost.
                return value + len(self.rows) * min(0.0, worst), reduced, used
            self.add(new)

    def _negative(self, reduced: np.ndarray, below: float) -> list[int]:
        """Return the indices of stages to add; update (N,) reduced costs to tighter bounds."""
        count = min(TIGHTENED, len(reduced) - 1)
        while True:
            least = np.argpartition(reduced, count)[: count + 1]
            rose = self.columns.tighten(least)
            reduced[least] += rose
            least = least[np.argsort(reduced[least], kind="stable")[:PRICED]]
            new = [
                int(index) for index in least
                if reduced[index] < below and index not in self.variables
            ]
            if new or not rose.any():
                return new


def best_partition(
    evaluator: StageEvaluator, within: int, start: list[int], effort: Effort,
    better: Callable[[list[int]], None], proven: Callable[[float], None],
) -> tuple[list[int], float]:
    """Return the best stages found for the modules ``within``, and a lower bound of the seconds.
    Raise ``NoPlanError`` if there are more than ``effort.stages`` stages.

    Args:
        evaluator: evaluates stages; its ``nodes`` is the initial effort per stage.
        start: initial sets of modules, in order.
        better, proven: called with every better sequence and every higher bound.
    """
    columns = _Columns(evaluator, within, effort.stages)
    best, upper, lower = list(start), total_seconds(evaluator, start), 0.0
    program = _Program(
        columns, [columns.at(s) for s in [*(1 << m for m in columns.modules), *start]]
    )
    for _ in range(effort.rounds):
        bound, reduced, used = program.solve()
        lower = max(lower, min(bound, upper))
        proven(lower)
        gap = upper - bound
        if gap <= upper * ROUNDING:
            return best, upper
        if _raised(columns, used, gap, effort.nodes):
            continue
        # The stages of the program cannot be tightened further: choose whole stages now.
        candidates = np.flatnonzero(reduced < gap)
        reduced[candidates] += columns.tighten(candidates)
        candidates = candidates[reduced[candidates] < gap]
        if len(candidates) > MOST_CHOICES:
            candidates = np.sort(
                candidates[np.argsort(reduced[candidates], kind="stable")][:MOST_CHOICES]
            )
            complete = False
        else:
            complete = True
        chosen, value = _choose(columns, candidates, upper)
        if chosen is None:
            if complete and value == np.inf:
                proven(upper)
                return best, upper
            return best, lower
        if complete:
            lower = max(lower, min(value, upper))
            proven(lower)
        progress = _raised(columns, [columns.at(s) for s in chosen], gap, effort.nodes)
        ordered = in_order_within(evaluator.problem, chosen, within)
        seconds = total_seconds(evaluator, chosen)
        if ordered and seconds < upper * (1 - ROUNDING):
            upper, best, progress = seconds, ordered, True
            better(ordered)
        if not progress:
            return best, lower
    return best, lower


def _raised(columns: _Columns, used: list[int], gap: float, nodes: int) -> bool:
    """Raise the known lower bounds of stages; return True if that succeeded."""
    evaluator, progress = columns.evaluator, False
    for index in used:
        stage, cost = int(columns.stages[index]), float(columns.cost[index])
        if stage in evaluator.results:
            result = evaluator.results[stage]
            if not result.exact and result.nodes < nodes:
                evaluator.refined(stage, min(nodes, result.nodes * REFINEMENT))
                progress = True
        elif evaluator.probe(stage, cost + gap).bound <= cost * (1 + ROUNDING):
            evaluator.result(stage)
            progress = True
        columns.update(stage)
        progress = progress or columns.cost[index] > cost * (1 + ROUNDING)
    return progress


def _choose(
    columns: _Columns, hopeful: np.ndarray, upper: float
) -> tuple[list[int] | None, float]:
    """Return the best partition into some of the stages and a bound; None and infinity if none is
    below ``upper``."""
    model = cp_model.CpModel()
    take = [model.new_bool_var("") for _ in hopeful]
    scale = UNITS / upper
    cost = np.floor(columns.cost[hopeful] * scale).astype(np.int64)
    for m in columns.modules:
        model.add_exactly_one(
            take[i] for i, index in enumerate(hopeful) if int(columns.stages[index]) >> m & 1
        )
    total = sum(int(c) * x for c, x in zip(cost, take, strict=True))
    model.add(total < UNITS)
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = CHOICE_WORK
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None, np.inf
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, 0.0
    chosen = [
        int(columns.stages[index]) for i, index in enumerate(hopeful) if solver.value(take[i])
    ]
    return chosen, solver.best_objective_bound / scale
