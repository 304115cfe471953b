"""Optimal distribution of blocks over ranks with equal counts, by CP-SAT.

Reference for the distributions that are fast enough to compute per step (Cornstarch v2, eq. 4, with
the counts as constraints).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from ortools.sat.python import cp_model

from raymm.scheduler.context_parallel.distribution import TokenDistribution, distribute


def exact_distribution(work: np.ndarray, ranks: int, time_limit_s: float) -> TokenDistribution:
    """Distribute full blocks with equal counts and minimal largest work within the time limit.

    Args:
        work: (blocks,) integers, work per block in any unit.
        time_limit_s: seconds for the solver.
    """
    start = distribute(work, ranks)
    blocks, bound = solve_equal_counts(work, start.blocks, -1, start.bound, time_limit_s, 0)
    loads = tuple(int(work[mine].sum()) for mine in blocks)
    return replace(
        start, policy="exact", blocks=tuple(map(tuple, blocks)), work=loads, bound=bound,
        status="optimal" if max(loads) <= bound else "feasible",
    )


def solve_equal_counts(
    work: np.ndarray,
    start: Sequence[Sequence[int]],
    pinned: int,
    bound: int,
    time_limit_s: float,
    seed: int,
) -> tuple[list[list[int]], int]:
    """Improve a distribution until it is optimal or the time limit expires.

    Blocks of equal work are distinguished only by their number per rank, and ranks with equal
    counts are ordered by load, so that the solver does not prove symmetric cases twice.

    Args:
        work: (n,) int64, not negative.
        start: blocks of every rank; the counts are kept.
        pinned: block that stays with its rank, or -1.
        bound: lower bound of the largest work per rank.
        time_limit_s: seconds.

    Returns:
        Blocks of every rank, and the best lower bound that was proven.
    """
    first = [[int(work[b]) for b in blocks if b != pinned] for blocks in start]
    fixed = [int(work[pinned]) if pinned in blocks else 0 for blocks in start]
    loads = [sum(values) + base for values, base in zip(first, fixed, strict=True)]
    if max(loads) == bound:
        return [list(blocks) for blocks in start], bound
    multiplicity = Counter(int(value) for b, value in enumerate(work) if b != pinned)
    values = sorted(multiplicity)

    model = cp_model.CpModel()
    largest = model.new_int_var(bound, max(loads), "largest")
    model.minimize(largest)
    number = [
        {v: model.new_int_var(0, min(multiplicity[v], len(mine)), f"{v}@{rank}") for v in values}
        for rank, mine in enumerate(first)
    ]
    for v in values:
        model.add(sum(one[v] for one in number) == multiplicity[v])
    total = []
    for one, mine, base in zip(number, first, fixed, strict=True):
        model.add(sum(one.values()) == len(mine))
        total.append(sum(v * one[v] for v in values) + base)
        model.add(total[-1] <= largest)
        hint = Counter(mine)
        for v in values:
            model.add_hint(one[v], hint[v])
    alike: dict[tuple[int, bool], list[int]] = {}
    for rank, blocks in enumerate(start):
        alike.setdefault((len(blocks), pinned in blocks), []).append(rank)
    for members in alike.values():
        members.sort(key=lambda rank: loads[rank])  # the hint must satisfy the order
        for a, b in zip(members, members[1:], strict=False):
            model.add(total[a] <= total[b])

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    bound = max(bound, int(np.ceil(solver.best_objective_bound - 1e-6)))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return [list(blocks) for blocks in start], bound
    of_value: dict[int, list[int]] = {v: [] for v in values}
    for b, value in enumerate(work.tolist()):
        if b != pinned:
            of_value[value].append(b)
    result = []
    for one, blocks in zip(number, start, strict=True):
        mine = [of_value[v].pop() for v in values for _ in range(solver.value(one[v]))]
        result.append(sorted(mine + ([pinned] if pinned in blocks else [])))
    return result, bound
