"""What a stage takes at least, from quota and bandwidth: cheap, for a million stages at once."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numba import njit

from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.solver.stage_packing import InterferenceLaw

CHUNK_BITS = 10
# Shares of bandwidth in the weights of the bounds (quota has the rest), and their unit: parts of a
# GPU, rounded down.
MIXES = (0.0, 0.15, 0.3)
UNITS = 10_000


def entry_seconds(problem: MappingProblem) -> np.ndarray:
    """(M, J, steps + 1) lower bounds of a module's seconds on GPUs of which it shares at least
    one, whoever the others are; infinite at a whole GPU's quota, which leaves nothing to share."""
    model, use, steps = problem.interference, problem.bandwidth, problem.steps
    feasible = np.any(np.isfinite(problem.seconds), axis=1)  # (M, steps + 1)
    result = np.full_like(problem.seconds, np.inf)
    for m in range(len(problem.names)):
        others = [
            o for o in range(len(problem.names))
            if o != m and not problem.related[m] >> o & 1
        ]
        for q in range(1, steps):
            peers = [use[o, 1 : steps - q + 1][feasible[o, 1 : steps - q + 1]] for o in others]
            peers = [uses for uses in peers if len(uses)]
            if not peers:
                continue
            delay = _least_delay(model, float(use[m, q]), peers)
            runs = np.isfinite(problem.seconds[m, :, q])
            result[m, runs, q] = model.seconds(problem.seconds[m, runs, q], delay)
    return result


def _least_delay(model: Interference, own: float, peers: list[np.ndarray]) -> float:
    """Of a module beside at least one peer, each with one of its bandwidths."""
    least = min(float(uses.min()) for uses in peers)
    everyone = sum(float(uses.max()) for uses in peers)
    additive = model.additive
    many = own + (2 * least if additive >= 0 else everyone)
    if model.coupling == "own":
        coupled = own * (least if model.product >= 0 else everyone)
    else:
        coupled = 0.0 if model.product >= 0 else 1.0
    # Two or more peers; or exactly one, whose product is known better.
    more = max(0.0, model.constant + additive * many + model.product * coupled)
    most = max(float(uses.max()) for uses in peers)
    alone = min(model.delay(own, [value]) for value in (least, most))  # it is linear between
    return min(alone, more)


@njit(cache=True)
def shared_weight(quota, steps, own_use, cap, law, mix):
    """Part of a GPU that a replica takes beside others at least.

    On a GPU of at least two modules with bandwidths of sum S, eq. 8 says that module i's delay is
    at least ``e1 + e2 S`` (with its own coupling, ``e1 - e3 B_i^2 + (e2 + e3 B_i) S``), so that it
    is in time only if S is at most some C_i. Hence the sum over them of ``B_i / C_i`` is at most
    S / min(C) <= 1, as is that of their quotas; and so is that of any mix of both.

    Args:
        quota, steps: of the replica, and of a whole GPU.
        own_use: B_i, share of the bandwidth.
        cap: the delay that it can bear, in the law's unit.
        law: an :class:`.stage_packing.InterferenceLaw`.
        mix: share of bandwidth in the weight, from 0 to 1; quota has the rest.

    Returns:
        The part, from 0 to 1.
    """
    if law.own:
        slope = law.additive + law.product * own_use
        most = cap - law.constant + law.product * own_use * own_use
    else:
        slope = law.additive
        most = cap - law.constant - min(0.0, law.product) * own_use
    share = 0.0
    if slope > 0.0:
        share = 1.0 if most <= own_use * slope else own_use * slope / most
    return (1.0 - mix) * quota / steps + mix * share


@njit(cache=True)
def _needs(seconds, entry, bandwidth, grid, mixes, units, law):
    """(K, M, V) units of the pool that module m needs at least to be done by each of ``grid``."""
    modules, degrees, columns = seconds.shape
    steps = columns - 1
    result = np.full((len(mixes), modules, len(grid)), (units << degrees) + 1, np.int32)
    for m in range(modules):
        for j in range(degrees):
            for q in range(1, steps + 1):
                alone = seconds[m, j, q]
                for v in range(np.searchsorted(grid, alone), len(grid)):
                    for k in range(len(mixes)):
                        result[k, m, v] = min(result[k, m, v], units << j)
                if q == steps:
                    continue
                for v in range(np.searchsorted(grid, entry[m, j, q]), len(grid)):
                    cap = grid[v] / alone - 1.0 if law.relative else grid[v] - alone
                    for k in range(len(mixes)):
                        part = shared_weight(q, steps, bandwidth[m, q], cap, law, mixes[k])
                        need = int((units << j) * part * (1.0 - 1e-12))
                        result[k, m, v] = min(result[k, m, v], need)
    return result


@njit(cache=True)
def _first_fits(stages, tables, last, mask, bits_, pool, mixes, grid):
    """(N,) lower bounds of stages: of every mix, by a binary search over the grid."""
    result = np.empty(len(stages))
    for i in range(len(stages)):
        start = 0
        best = 0.0
        for k in range(len(mixes)):
            low, high = start, last
            while low < high:
                middle = (low + high) // 2
                need, rest = 0, stages[i]
                for c in range(tables.shape[1]):
                    need += tables[k, c, rest & mask, middle]
                    rest >>= bits_
                if need <= pool:
                    high = middle
                else:
                    low = middle + 1
            # Quota alone changes only on the grid; caps rise between its values, too.
            if mixes[k] == 0.0:
                best = grid[low] if low < last else np.inf
            elif low > start:
                best = max(best, grid[low - 1])  # beyond the grid caps still rise
            start = low
            if low == last:
                break
        result[i] = best
    return result


class StageBounds:
    """Lower bounds of stages' seconds.

    To be done in time t, module m needs some part of the pool, at least that of its least option
    that is done in t; a stage whose modules need more than the pool has takes longer than t. Parts
    are of quota and of what a GPU's modules can bear of each other's bandwidth, in several mixes
    (:func:`shared_weight`); the best bound counts. Options in which a module could not bear anyone
    beside it take whole GPUs.
    """

    def __init__(self, problem: MappingProblem) -> None:
        self.problem = problem
        self.entry = entry_seconds(problem)
        self.pool = problem.gpus * UNITS
        self._single: dict[int, float] = {}

    @cached_property
    def grid(self) -> np.ndarray:
        """(V,) seconds at which options appear, ascending."""
        both = np.concatenate([self.problem.seconds.ravel(), self.entry.ravel()])
        return np.unique(both[np.isfinite(both)])

    @cached_property
    def _tables(self) -> np.ndarray:
        """(K, C, 2^k, V) what every set of modules of a chunk needs."""
        need = _needs(
            self.problem.seconds, self.entry, self.problem.bandwidth, self.grid, np.array(MIXES),
            UNITS, InterferenceLaw.of(self.problem.interference),
        )
        size = min(CHUNK_BITS, need.shape[1])
        chunks = -(-need.shape[1] // CHUNK_BITS)
        tables = np.zeros((len(MIXES), chunks, 1 << size, need.shape[2]), np.int32)
        for c in range(chunks):
            for i, m in enumerate(range(c * CHUNK_BITS, min((c + 1) * CHUNK_BITS, need.shape[1]))):
                half = 1 << i
                tables[:, c, half : 2 * half] = tables[:, c, :half] + need[:, None, m]
        return tables

    def bound(self, stage: int) -> float:
        """Of one stage; infinite if it can never fit."""
        least = self._single.get(stage)
        if least is None:
            least = self._single[stage] = float(self.bounds(np.array([stage], np.int64))[0])
        return least

    def bounds(self, stages: np.ndarray, mixes: int = len(MIXES)) -> np.ndarray:
        """(N,) of the stages (N,), sets of modules as bits; of the first so many mixes only."""
        return _first_fits(
            stages, self._tables, len(self.grid), (1 << CHUNK_BITS) - 1, CHUNK_BITS, self.pool,
            np.array(MIXES[:mixes]), self.grid,
        )
