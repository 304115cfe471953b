"""What a stage takes at least, from quota alone: cheap, for a million stages at once."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from raymm.scheduler.multiplex.problem import MappingProblem, bits

CHUNK_BITS = 10


def entry_seconds(problem: MappingProblem) -> np.ndarray:
    """(M, J, steps + 1) lower bounds of a module's seconds on GPUs of which it shares at least
    one, whoever the others are; infinite at a whole GPU's quota, which leaves nothing to share."""
    model, use, steps = problem.interference, problem.bandwidth, problem.steps
    known = np.isfinite(problem.seconds).any(1)  # (M, steps + 1)
    result = np.full_like(problem.seconds, np.inf)
    for m in range(len(problem.names)):
        others = [
            o for o in range(len(problem.names))
            if o != m and not problem.related[m] >> o & 1
        ]
        for q in range(1, steps):
            peers = [use[o, 1 : steps - q + 1][known[o, 1 : steps - q + 1]] for o in others]
            peers = [found for found in peers if len(found)]
            if not peers:
                continue
            delay = _least_delay(model, float(use[m, q]), peers)
            runs = np.isfinite(problem.seconds[m, :, q])
            result[m, runs, q] = model.seconds(problem.seconds[m, runs, q], delay)
    return result


def _least_delay(model, own: float, peers: list[np.ndarray]) -> float:
    """Of a module beside at least one peer, each with one of its bandwidths."""
    least = min(float(found.min()) for found in peers)
    everyone = sum(float(found.max()) for found in peers)
    additive = model.additive
    many = own + (2 * least if additive >= 0 else everyone)
    if model.coupling == "own":
        coupled = own * (least if model.product >= 0 else everyone)
    else:
        coupled = 0.0 if model.product >= 0 else 1.0
    # Two or more peers; or exactly one, whose product is known better.
    more = max(0.0, model.constant + additive * many + model.product * coupled)
    one = min(
        model.delay(own, [float(value)]) for found in peers for value in (found.min(), found.max())
    )
    return min(one, more)


class StageBounds:
    """Lower bounds of stages' seconds.

    To be done in time t, module m needs some quota steps of the pool, at least those of its least
    option that is done in t; a stage whose modules need more than the pool has takes longer
    than t. Options in which a module could not bear anyone beside it take whole GPUs.
    """

    def __init__(self, problem: MappingProblem) -> None:
        self.problem = problem
        self.entry = entry_seconds(problem)
        self.pool = problem.gpus * problem.steps

    @cached_property
    def _curves(self) -> tuple[np.ndarray, np.ndarray]:
        """(V,) seconds, ascending, and (M, V) steps that each module needs to be done by then."""
        degrees = np.array(self.problem.degrees)[:, None]
        quota = np.arange(self.problem.steps + 1)[None, :]
        values, areas = [], []
        for m in range(len(self.problem.names)):
            alone, shared = self.problem.seconds[m], self.entry[m]
            seconds = np.concatenate([alone.ravel(), shared.ravel()])
            area = np.concatenate([
                np.broadcast_to(degrees * self.problem.steps, alone.shape).ravel(),
                (degrees * quota).ravel(),
            ])
            keep = np.isfinite(seconds)
            values.append(seconds[keep])
            areas.append(area[keep])
        grid = np.unique(np.concatenate(values))
        # More than the pool, but so that sums stay small.
        need = np.full((len(values), len(grid)), self.pool + 1, np.int32)
        for m, (seconds, area) in enumerate(zip(values, areas, strict=True)):
            np.minimum.at(need[m], np.searchsorted(grid, seconds), area.astype(np.int32))
        return grid, np.minimum.accumulate(need, axis=1)

    @property
    def grid(self) -> np.ndarray:
        """(V,) seconds at which something changes, ascending."""
        return self._curves[0]

    @cached_property
    def _chunks(self) -> list[np.ndarray]:
        """Per chunk of modules, (2^k, V) what every set of them needs."""
        need = self._curves[1]
        tables = []
        for first in range(0, len(need), CHUNK_BITS):
            table = np.zeros((1, need.shape[1]), np.int32)
            for row in need[first : first + CHUNK_BITS]:
                table = np.concatenate([table, table + row])
            tables.append(table)
        return tables

    def needs(self, stage: int) -> np.ndarray:
        """(V,) steps of the pool that the stage's modules need to be done by each of ``grid``."""
        return self._curves[1][list(bits(stage))].sum(0)

    def bound(self, stage: int) -> float:
        """Of one stage; infinite if it can never fit."""
        at = int(np.searchsorted(-self.needs(stage), -self.pool))
        return float(self.grid[at]) if at < len(self.grid) else np.inf

    def bounds(self, stages: np.ndarray) -> np.ndarray:
        """(N,) of the stages (N,), sets of modules as bits."""
        mask = (1 << CHUNK_BITS) - 1
        parts = [stages >> (CHUNK_BITS * c) & mask for c in range(len(self._chunks))]
        low = np.zeros(len(stages), np.int64)
        high = np.full(len(stages), len(self.grid))
        while (open_ := low < high).any():
            middle = np.minimum((low + high) // 2, len(self.grid) - 1)
            need = np.zeros(len(stages), np.int32)
            for table, part in zip(self._chunks, parts, strict=True):
                need += table[part, middle]
            fits = need <= self.pool
            high = np.where(open_ & fits, middle, high)
            low = np.where(open_ & ~fits, middle + 1, low)
        return np.append(self.grid, np.inf)[low]
