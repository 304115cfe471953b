"""Bounds and proofs for partitions into stages of modules with hardly any dependencies.

With n independent modules there are 2^n stages and far more sequences. Any mapping is a partition
of the modules into stages, so the linear program over all stages (set partitioning) gives a lower
bound, even without dependencies. Columns are priced over all stages at once, with lower bounds as
cost, and only stages in its solution are solved (as in
:mod:`raymm.scheduler.multiplex.solver.sequence_dp`). Stages whose reduced cost exceeds the gap
between the bounds are in no better partition; CP-SAT chooses among the others.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from ortools.linear_solver import pywraplp
from ortools.sat.python import cp_model

from raymm.errors import NoPlanError
from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.solver.sequence_dp import (
    REFINEMENT,
    Effort,
    in_order_within,
    total_seconds,
)
from raymm.scheduler.multiplex.solver.stage_evaluation import ROUNDING, StageEvaluator

# Columns added to the linear program at once, and candidates whose bounds are tightened for that.
PRICED = 40
TIGHTENED = 20_000
# Most stages for one CP-SAT model, its deterministic time limit, and the unit of its integers.
MOST_CHOICES = 3_000
CHOICE_WORK = 2.0
UNITS = 10**9
USED = 1e-6
CHUNK_BITS = 10


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
        for stage in self.stages[[self.at(s) for s in self._seen(within)]]:
            self.update(int(stage))
        rows = len(evaluator.problem.names)
        self._parts = [
            (self.stages >> first & ((1 << CHUNK_BITS) - 1)).astype(np.int16)
            for first in range(0, rows, CHUNK_BITS)
        ]

    def _seen(self, within: int) -> list[int]:
        return [stage for stage in self.evaluator.results if not stage & ~within]

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
