"""Steps mixed from several sources by weights that may change during a run, from metadata only.

Systematic sampling (Madow, 1944) determines the number of samples per source in a step: the share
of the source, rounded up or down, and exact on average. Each source has separate epochs, so each of
its samples comes once before any sample repeats, whatever the weights.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raymm.data.sampling.sampler import State
from raymm.errors import DataError

# First step -> weight from that step on.
Schedule = Mapping[int, float]
_KEYS = {"step", "taken"}
# Part of the seed that separates the draws of sources from the order within a step.
_MIX, _ORDER = 1, 2


class WeightedSampler:
    """Deterministic, endless stream of sample indices in which each source has its share.

    A state contains the number of the step and, by source name, the number of samples taken so far.
    A run can therefore resume with another ``batch_size``, other weights, or additional sources at
    the end of the list. The samples of a step depend only on the state, the seed and these
    settings.

    Args:
        sources: (N,) source index of every sample, ascending.
        weights: weight schedule of every source. Weights that are all 0 at some step raise a
            ``DataError``.
        batch_size: samples per step, > 0.
        shuffle: True to permute the samples of a source in each of its epochs.
        seed: >= 0.
    """

    def __init__(
        self, names: Sequence[str], sources: np.ndarray, weights: Sequence[Schedule],
        batch_size: int, shuffle: bool = True, seed: int = 0,
    ) -> None:
        self.names, self.batch_size = tuple(names), batch_size
        self.shuffle, self.seed = shuffle, seed
        self._weights = [dict(sorted(schedule.items())) for schedule in weights]
        self._sizes = np.bincount(sources, minlength=len(self.names))
        self._starts = np.cumsum([0, *self._sizes])
        self.length = int(self._starts[-1])
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # the current epoch of each source
        for step in sorted({first for schedule in self._weights for first in schedule}):
            self._cumulated(step)

    def _cumulated(self, step: int) -> np.ndarray:
        """Return the cumulative shares of the sources at a step, (sources,) float64, ending with 1.
        """
        sums = np.cumsum([_at(schedule, step) for schedule in self._weights])
        if not sums[-1]:
            raise DataError(
                f"data.train: the weights of all sources are 0 from step {step} on; accepted: at "
                "least one weight above 0"
            )
        return sums / sums[-1]

    def batches(self, state: State | None = None) -> Iterator[tuple[list[int], State]]:
        """Yield (indices of one step, state after the step) endlessly; errors are those of
        :meth:`check`."""
        step, positions = self.check(state)
        while True:
            generator = np.random.default_rng([self.seed, _MIX, step])
            edges = self._cumulated(step) * self.batch_size + generator.random()
            counts = np.diff(np.minimum(np.floor(edges), self.batch_size), prepend=0).astype(int)
            indices = [
                self._sample(source, positions[source] + number)
                for source, count in enumerate(counts) for number in range(count)
            ]
            order = np.random.default_rng([self.seed, _ORDER, step]).permutation(len(indices))
            step, positions = step + 1, [a + int(b) for a, b in zip(positions, counts, strict=True)]
            after = {"step": step, "taken": dict(zip(self.names, positions, strict=True))}
            yield [indices[position] for position in order], after

    def check(self, state: State | None) -> tuple[int, list[int]]:
        """Return (step, samples taken from each source) of a state; None is the beginning. Raise a
        ``DataError`` if the state comes from another sampler."""
        if state is None:
            return 0, [0] * len(self.names)
        is_valid = (
            isinstance(state, Mapping) and set(state) == _KEYS and _is_count(state["step"])
            and isinstance(state["taken"], Mapping) and all(map(_is_count, state["taken"].values()))
        )
        if not is_valid:
            raise DataError(
                f"data.train has weights, but data position {state} belongs to a run without "
                "weights; resume without weights, or start a new run"
            )
        return state["step"], [state["taken"].get(name, 0) for name in self.names]

    def _sample(self, source: int, number: int) -> int:
        """Return the sample of a source at position ``number``, counted over all its epochs."""
        size = int(self._sizes[source])
        epoch, position = divmod(number, size)
        if source not in self._orders or self._orders[source][0] != epoch:
            self._orders[source] = epoch, self._order(source, epoch, size)
        return int(self._starts[source] + self._orders[source][1][position])

    def _order(self, source: int, epoch: int, size: int) -> np.ndarray:
        """Return the order of an epoch of a source. The seed contains the name of the source, so
        that adding a source does not change the order of others."""
        if not self.shuffle:
            return np.arange(size)
        key = [self.seed, zlib.crc32(self.names[source].encode()), epoch]
        return np.random.default_rng(key).permutation(size)


def _at(schedule: Schedule, step: int) -> float:
    firsts = list(schedule)
    return schedule[firsts[bisect_right(firsts, step) - 1]]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
