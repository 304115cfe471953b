"""Least seconds of a stage: exact if the search completes, otherwise between bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numba import njit

from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.multiplex.mapping import Placement
from raymm.scheduler.multiplex.problem import MappingProblem, bits
from raymm.scheduler.multiplex.solver.packing import (
    IMPOSSIBLE,
    SOLVED,
    InterferenceLaw,
    Packed,
    Pool,
    StageInputs,
    StagePacking,
)
from raymm.scheduler.multiplex.solver.stage_search import (
    Repacking,
    SearchEffort,
    class_seconds,
    least_seconds,
    pack_either,
    repack,
)

# Placements that one search tries, first to find a good solution, then to prove it.
QUICK_NODES = 400
NODES = 4_000
# From this number of modules on, a stage whose search gave up is improved by repacking: restarts,
# tries since the last improvement, numbers of modules to repack, nodes per search, and variation of
# the order.
LARGE = 8
RESTARTS = 8
REPLACEMENTS = (12, 300)
REPLACED = (2, 7)
REPLACING_NODES = (400, 1_500)
PERTURBATION = 0.5
SEEDS = 2**32
# Factor of NODES if no placement was found at any seconds, because memory is tight.
LAST_RESORT = 50
# Relative improvements below this are rounding.
ROUNDING = 1e-11
NO_LIMIT = 2**62
CHUNK_BITS = 10
# Weights of bandwidth in the bounds (the rest is for quota), and their unit: parts of a GPU,
# rounded down.
MIXES = (0.0, 0.15, 0.3)
UNITS = 10_000


@dataclass(frozen=True)
class StageResult:
    """Known results for one stage.

    Attributes:
        seconds: seconds of the best placements found; infinite if there are none.
        bound: proven lower bound; infinite if no placements exist.
        packing: placements that take ``seconds``, if any.
        nodes: effort that was allowed.
    """

    seconds: float
    bound: float
    packing: StagePacking | None = None
    nodes: int = 0

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.packing.placements if self.packing else ()

    @property
    def exact(self) -> bool:
        """True if ``seconds`` is proven to be optimal."""
        return self.bound >= self.seconds * (1 - ROUNDING)


class StageEvaluator:
    """Evaluator of stages, given as sets of modules (bits), with a cache of results.

    Args:
        nodes: placements that one search may try; more gives exact results more often.
    """

    def __init__(self, problem: MappingProblem, nodes: int = NODES) -> None:
        self.problem = problem
        self.nodes = nodes
        self._stop: Callable[[], bool] | None = None
        self.bounds = StageBounds(problem)
        self.results: dict[int, StageResult] = {}
        self.searches = 0
        self._probed: dict[int, StageResult] = {}
        self._inputs_of: dict[int, StageInputs] = {}
        self._law = InterferenceLaw.of(problem.interference)
        self._memory = np.where(problem.memory < 0, NO_LIMIT, problem.memory)

    def interrupt_if(self, stop: Callable[[], bool]) -> None:
        """Call ``stop`` between the following searches, and raise :class:`KeyboardInterrupt` if it
        returns True."""
        self._stop = stop

    def result(self, stage: int) -> StageResult:
        """Return the least seconds of a stage, as well as ``nodes`` allow."""
        best = self.results.get(stage)
        if best is None:
            best = self.results[stage] = self._evaluate(stage)
        return best

    def refined(self, stage: int, nodes: int) -> StageResult:
        """Return the result after more effort than before, unless it was already exact."""
        best = self.result(stage)
        if not best.exact and best.nodes < nodes:
            best = self._narrowed(stage, best, nodes)
            if not best.exact and stage.bit_count() >= LARGE:
                best = self._polished(stage, best, REPLACEMENTS[1], REPLACING_NODES[1])
                best = self._narrowed(stage, best, nodes)
            best = self.results[stage] = self._raised(stage, best, nodes)
        return best

    def probe(self, stage: int, below: float) -> StageResult:
        """Run a single search for placements that take less than ``below`` seconds, and return the
        best known result: ``seconds`` is less if there are any, else ``bound`` is at least
        ``below``."""
        best = self.best_known(stage)
        if best.seconds < below or best.bound >= below:
            return best
        outcome = self._search(stage, below, max(self.nodes, best.nodes))
        if isinstance(outcome, StageResult):
            best = replace(outcome, bound=best.bound, nodes=best.nodes)
        elif outcome == IMPOSSIBLE:
            best = replace(best, bound=below)
        (self.results if stage in self.results else self._probed)[stage] = best
        return best

    def best_known(self, stage: int) -> StageResult:
        """Return the best known result, without a search."""
        best = self.results.get(stage) or self._probed.get(stage)
        return best or StageResult(np.inf, self.bounds.bound(stage))

    def known_bound(self, stage: int) -> float:
        """Return the best bound that is known without a search."""
        return self.best_known(stage).bound

    def forget(self) -> None:
        self.results.clear()
        self._probed.clear()

    def _evaluate(self, stage: int) -> StageResult:
        best = self.best_known(stage)
        if not np.isfinite(best.bound):
            return StageResult(np.inf, np.inf, None, self.nodes)
        if best.packing is None:
            self._ask_stop()
            modules = list(bits(stage))
            effort = SearchEffort(QUICK_NODES, self.nodes, LAST_RESORT * self.nodes, ROUNDING)
            seconds, bound, searches, packed = least_seconds(
                self._inputs(stage), self.bounds.grid, best.bound, effort
            )
            self.searches += searches
            packing = self._packing(modules, packed) if np.isfinite(seconds) else None
            result = StageResult(float(seconds), float(bound), packing, self.nodes)
        else:
            result = self._narrowed(stage, best, self.nodes)
        if not result.exact and stage.bit_count() >= LARGE:
            result = self._polished(stage, result, REPLACEMENTS[0], REPLACING_NODES[0])
            result = self._narrowed(stage, result, self.nodes)
        return result

    def _polished(
        self, stage: int, best: StageResult, replacements: int, nodes: int
    ) -> StageResult:
        """Improve placements of a stage that is too large to search completely."""
        if best.packing is not None and not best.exact:
            inputs = self._inputs(stage)
            effort = Repacking(RESTARTS, replacements, *REPLACED, PERTURBATION, ROUNDING, nodes)
            packed = repack(inputs, best.packing.packed, effort, stage % SEEDS)
            seconds = float(class_seconds(inputs, packed).max())
            if seconds < best.seconds:
                packing = self._packing(list(bits(stage)), packed)
                best = replace(best, seconds=seconds, packing=packing)
        return best

    def _narrowed(self, stage: int, best: StageResult, nodes: int) -> StageResult:
        while np.isfinite(best.seconds) and not best.exact:
            outcome = self._search(stage, best.seconds * (1 - ROUNDING), nodes)
            if isinstance(outcome, StageResult):
                best = replace(outcome, bound=best.bound)
            elif outcome == IMPOSSIBLE:
                return replace(best, bound=best.seconds, nodes=nodes)
            else:
                break
        return replace(best, nodes=nodes)

    def _raised(self, stage: int, best: StageResult, nodes: int) -> StageResult:
        """Raise the bound by proving that lower seconds are impossible."""
        grid = self.bounds.grid
        low = int(np.searchsorted(grid, best.bound, side="right"))
        high = int(np.searchsorted(grid, best.seconds))
        while low < high and not best.exact and np.isfinite(best.seconds):
            middle = (low + high) // 2
            target = float(grid[middle])
            outcome = self._search(stage, target, nodes)
            if isinstance(outcome, StageResult):
                best = replace(outcome, bound=best.bound)
                high = min(middle, int(np.searchsorted(grid, best.seconds)))
            elif outcome == IMPOSSIBLE:
                best = replace(best, bound=max(best.bound, target))
                low = middle + 1
            else:
                high = middle
        return best

    def _search(self, stage: int, before: float, nodes: int) -> StageResult | int:
        self._ask_stop()
        self.searches += 1
        outcome, seconds, packed = pack_either(self._inputs(stage), before, nodes)
        if outcome != SOLVED:
            return outcome
        return StageResult(float(seconds), 0.0, self._packing(list(bits(stage)), packed))

    def _ask_stop(self) -> None:
        if self._stop is not None and self._stop():
            raise KeyboardInterrupt

    def _inputs(self, stage: int) -> StageInputs:
        inputs = self._inputs_of.get(stage)
        if inputs is None:
            problem, modules = self.problem, list(bits(stage))
            limit = NO_LIMIT - 1 if problem.memory_bytes is None else problem.memory_bytes
            inputs = self._inputs_of[stage] = StageInputs(
                problem.seconds[modules], self._memory[modules], problem.bandwidth[modules],
                self.bounds.entry[modules], Pool(problem.gpus, problem.steps, limit, self._law),
            )
        return inputs

    def _packing(self, modules: list[int], packed: Packed) -> StagePacking:
        return StagePacking(tuple(self.problem.names[m] for m in modules), packed)


def entry_seconds(problem: MappingProblem) -> np.ndarray:
    """Return (M, J, steps + 1) lower bounds of a module's seconds if it shares at least one GPU
    with any other module; infinite at a whole GPU's quota, which leaves nothing to share."""
    model, use, steps = problem.interference, problem.bandwidth, problem.steps
    feasible = np.any(np.isfinite(problem.seconds), axis=1)  # (M, steps + 1)
    result = np.full_like(problem.seconds, np.inf)
    for m in range(len(problem.names)):
        unrelated = [
            o for o in range(len(problem.names))
            if o != m and not problem.related[m] >> o & 1
        ]
        for q in range(1, steps):
            peers = [use[o, 1 : steps - q + 1][feasible[o, 1 : steps - q + 1]] for o in unrelated]
            peers = [uses for uses in peers if len(uses)]
            if not peers:
                continue
            delay = _least_delay(model, float(use[m, q]), peers)
            runs = np.isfinite(problem.seconds[m, :, q])
            result[m, runs, q] = model.seconds(problem.seconds[m, runs, q], delay)
    return result


def _least_delay(model: Interference, own: float, peers: list[np.ndarray]) -> float:
    """Return the least delay of a module next to at least one peer."""
    least = min(float(uses.min()) for uses in peers)
    total = sum(float(uses.max()) for uses in peers)
    additive = model.additive
    total_use = own + (2 * least if additive >= 0 else total)
    if model.coupling == "own":
        coupled = own * (least if model.product >= 0 else total)
    else:
        coupled = 0.0 if model.product >= 0 else 1.0
    # Two or more peers, or exactly one, whose product is known better.
    shared = max(0.0, model.constant + additive * total_use + model.product * coupled)
    most = max(float(uses.max()) for uses in peers)
    alone = min(model.delay(own, [value]) for value in (least, most))  # it is linear between
    return min(alone, shared)


@njit(cache=True)
def shared_weight(quota, steps, own_use, cap, law, mix):
    """Return a lower bound of the part (0 to 1) of a GPU that a replica takes next to other
    modules.

    On a GPU of at least two modules with bandwidths of sum S, eq. 8 says that module i's delay is
    at least ``e1 + e2 S`` (with coupling ``"own"``, ``e1 - e3 B_i^2 + (e2 + e3 B_i) S``), so it is
    in time only if S is at most some C_i. Hence the sum over them of ``B_i / C_i`` is at most S /
    min(C) <= 1, like the sum of their quotas, and like any mix of both.

    Args:
        quota, steps: of the replica, and of a whole GPU.
        own_use: B_i, share of the bandwidth.
        cap: largest acceptable delay, in the law's unit.
        law: an :class:`.packing.InterferenceLaw`.
        mix: weight of bandwidth, from 0 to 1; the rest is for quota.
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
    """Return the (K, M, V) least units of the pool that module m needs to finish by each of
    ``grid``."""
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
                        weight = shared_weight(q, steps, bandwidth[m, q], cap, law, mixes[k])
                        need = int((units << j) * weight * (1.0 - 1e-12))
                        result[k, m, v] = min(result[k, m, v], need)
    return result


@njit(cache=True)
def _first_fits(stages, tables, last, mask, bits_, pool, mixes, grid):
    """Return the (N,) lower bounds of stages, by a binary search over the grid for every mix."""
    result = np.empty(len(stages))
    for i in range(len(stages)):
        start = 0
        best = 0.0
        for k in range(len(mixes)):
            low, high = start, last
            while low < high:
                middle = (low + high) // 2
                need, remaining = 0, stages[i]
                for c in range(tables.shape[1]):
                    need += tables[k, c, remaining & mask, middle]
                    remaining >>= bits_
                if need <= pool:
                    high = middle
                else:
                    low = middle + 1
            # Needs from quota alone change only on the grid; with bandwidth they also fall between
            # its values.
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
    """Lower bounds of stages' seconds. To finish in time t, module m needs at least the smallest
    part of the pool over its options that finish in t. A stage whose modules need more than the
    whole pool takes longer than t. Parts are mixes of quota and of tolerable bandwidth of
    neighbours (:func:`shared_weight`); the best bound over several mixes counts. Options that
    tolerate no neighbour take whole GPUs."""

    def __init__(self, problem: MappingProblem) -> None:
        self.problem = problem
        self.entry = entry_seconds(problem)
        self.pool = problem.gpus * UNITS
        self._single: dict[int, float] = {}

    @cached_property
    def grid(self) -> np.ndarray:
        """(V,) seconds at which options appear, ascending."""
        seconds = np.concatenate([self.problem.seconds.ravel(), self.entry.ravel()])
        return np.unique(seconds[np.isfinite(seconds)])

    @cached_property
    def _tables(self) -> np.ndarray:
        """(K, C, 2^k, V) needs of every set of modules of a chunk."""
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
        """Return the bound of one stage; infinite if it can never fit."""
        least = self._single.get(stage)
        if least is None:
            least = self._single[stage] = float(self.bounds(np.array([stage], np.int64))[0])
        return least

    def bounds(self, stages: np.ndarray, mixes: int = len(MIXES)) -> np.ndarray:
        """Return the (N,) bounds of (N,) stages, sets of modules as bits, with the first ``mixes``
        mixes."""
        return _first_fits(
            stages, self._tables, len(self.grid), (1 << CHUNK_BITS) - 1, CHUNK_BITS, self.pool,
            np.array(MIXES[:mixes]), self.grid,
        )
