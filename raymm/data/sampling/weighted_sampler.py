"""Steps mixed of sources by weights that may change over the run: metadata only.

How many of a step's samples each source gives is drawn by systematic sampling (Madow, 1944): its
share of the step, rounded up or down, and its share exactly on the average. Each source has epochs
of its own, so each of its samples comes once before one comes again, whatever the weights are.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raymm.data.sampling.sampler import State
from raymm.errors import DataError

# First step -> weight from it on.
Schedule = Mapping[int, float]
_KEYS = {"step", "taken"}
# What tells the random numbers of steps from those of epochs.
_MIX, _ORDER = 1, 2


class WeightedSampler:
    """Deterministic stream of sample indices, of which each source gives its share.

    A state is the number of the step and how many samples each source has given, by its name. So
    another ``batch_size``, other weights, and sources that come to the end of the list are taken up
    where the run is; what a step has depends on nothing but the seed, its number and these.

    Args:
        names: of the sources.
        sources: (N,) numbers of the sources of all samples, ascending.
        weights: of every source, at each step. Not all 0 at any step.
        batch_size: samples per step, > 0.
        shuffle: permute each source's samples anew in each of its epochs.
        seed: >= 0.

    Raises:
        DataError: weights that are all 0 at some step.
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
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # of each source's last epoch
        for step in sorted({first for schedule in self._weights for first in schedule}):
            self._cumulated(step)

    def _cumulated(self, step: int) -> np.ndarray:
        """(sources,) float64: how much of a step is of a source or of one before it; ends with 1.

        Raises:
            DataError: all weights are 0 there.
        """
        sums = np.cumsum([_at(schedule, step) for schedule in self._weights])
        if not sums[-1]:
            raise DataError(
                f"data.train: the weights of all sources are 0 from step {step} on; accepted: one "
                "above 0 at least"
            )
        return sums / sums[-1]

    def batches(self, state: State | None = None) -> Iterator[tuple[list[int], State]]:
        """Endless (indices of one step, state after it), from ``state`` on.

        Raises:
            DataError: a state of another sampler.
        """
        step, taken = self.check(state)
        while True:
            generator = np.random.default_rng([self.seed, _MIX, step])
            edges = self._cumulated(step) * self.batch_size + generator.random()
            counts = np.diff(np.minimum(np.floor(edges), self.batch_size), prepend=0).astype(int)
            indices = [
                self._sample(source, taken[source] + number)
                for source, count in enumerate(counts) for number in range(count)
            ]
            order = np.random.default_rng([self.seed, _ORDER, step]).permutation(len(indices))
            step, taken = step + 1, [a + int(b) for a, b in zip(taken, counts, strict=True)]
            after = {"step": step, "taken": dict(zip(self.names, taken, strict=True))}
            yield [indices[place] for place in order], after

    def check(self, state: State | None) -> tuple[int, list[int]]:
        """(step, how many samples each source has given) of a state, None being the beginning.

        Raises:
            DataError: a state of another sampler.
        """
        if state is None:
            return 0, [0] * len(self.names)
        good = (
            isinstance(state, Mapping) and set(state) == _KEYS and _is_count(state["step"])
            and isinstance(state["taken"], Mapping) and all(map(_is_count, state["taken"].values()))
        )
        if not good:
            raise DataError(
                f"data.train has weights, but data position {state} is of a run without: go on "
                "without weights, or begin a new run"
            )
        return state["step"], [state["taken"].get(name, 0) for name in self.names]

    def _sample(self, source: int, number: int) -> int:
        """The sample that a source gives after so many."""
        size = int(self._sizes[source])
        epoch, place = divmod(number, size)
        if source not in self._orders or self._orders[source][0] != epoch:
            self._orders[source] = epoch, self._order(source, epoch, size)
        return int(self._starts[source] + self._orders[source][1][place])

    def _order(self, source: int, epoch: int, size: int) -> np.ndarray:
        """Of an epoch of a source; of its name, so that another source in front changes nothing."""
        if not self.shuffle:
            return np.arange(size)
        key = [self.seed, zlib.crc32(self.names[source].encode()), epoch]
        return np.random.default_rng(key).permutation(size)


def _at(schedule: Schedule, step: int) -> float:
    """The weight at a step."""
    firsts = list(schedule)
    return schedule[firsts[bisect_right(firsts, step) - 1]]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
