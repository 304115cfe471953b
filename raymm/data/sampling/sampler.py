"""Which samples make up a step, and which of them share a microbatch: metadata only."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from raymm.errors import DataError

# {"epoch": e, "position": samples of that epoch already taken}; planned steps have another
# (``raymm.data.sampling.group_sampler``). Plain JSON.
State = dict[str, Any]
START: State = {"epoch": 0, "position": 0}


class EpochSampler:
    """Deterministic stream of sample indices, epoch after epoch.

    Epoch ``e`` is the permutation drawn from ``numpy``'s generator seeded with (seed, e), or
    file order. Steps cross epoch boundaries: the last samples of an epoch share a step with the
    first of the next, so every epoch gives each sample exactly once.

    Args:
        length: samples in the dataset, > 0.
        batch_size: samples per step, > 0; may exceed ``length``.
        shuffle: permute.
        seed: >= 0.
    """

    def __init__(self, length: int, batch_size: int, shuffle: bool = True, seed: int = 0):
        self.length, self.batch_size, self.shuffle, self.seed = length, batch_size, shuffle, seed

    def order(self, epoch: int) -> np.ndarray:
        """(N,) int64 sample indices of an epoch, in order."""
        if not self.shuffle:
            return np.arange(self.length)
        return np.random.default_rng([self.seed, epoch]).permutation(self.length)

    def batches(self, state: State | None = None) -> Iterator[tuple[list[int], State]]:
        """Endless (indices of one step, state after it), from ``state`` on.

        Raises:
            DataError: a state that does not fit this dataset.
        """
        epoch, position = self.check(state)
        order = self.order(epoch)
        while True:
            indices: list[int] = []
            while len(indices) < self.batch_size:
                taken = order[position : position + self.batch_size - len(indices)]
                indices.extend(taken.tolist())
                position += len(taken)
                if position == self.length:
                    epoch, position = epoch + 1, 0
                    order = self.order(epoch)
            yield indices, {"epoch": epoch, "position": position}

    def one_pass(self, state: State | None = None) -> Iterator[tuple[list[int], State]]:
        """The same to the end of the epoch; the last step may be smaller."""
        epoch, position = self.check(state)
        order = self.order(epoch)
        while position < self.length:
            indices = order[position : position + self.batch_size].tolist()
            position += len(indices)
            done = position == self.length
            yield indices, {"epoch": epoch + done, "position": 0 if done else position}

    def check(self, state: State | None) -> tuple[int, int]:
        """(epoch, position) of a state, None being the beginning.

        Raises:
            DataError: a state that does not fit this dataset.
        """
        state = START if state is None else state
        if "step" in state:
            raise DataError(
                f"data.train has no weights, but data position {state} is one of sources with "
                "weights: go on with these, or begin a new run"
            )
        if "taken" in state:
            raise DataError(
                f"data.batching is 'random', but data position {state} is one of steps that were "
                "planned: go on with that batching, or begin a new run"
            )
        if set(state) != set(START):
            raise DataError(f"data position {state} must have the keys {sorted(START)}")
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position < self.length:
            raise DataError(
                f"data position {state} does not fit a dataset of {self.length} samples: "
                "was the file changed since the checkpoint?"
            )
        return epoch, position


def group_by_modality(indices: Sequence[int], counts: Mapping[str, np.ndarray]) -> list[int]:
    """``indices`` with samples of the same modalities next to each other, text-only last.

    Cut into microbatches in this order, most have no item at all of some modality, and that
    encoder then has nothing to do for them. Otherwise the order of ``indices`` is kept. A step's
    gradient does not depend on it: its loss is a sum over label tokens of the whole step.
    """
    return sorted(indices, key=lambda i: [counts[name][i] == 0 for name in counts])


def is_grouped(indices: Sequence[int] | Sequence[Sequence[int]]) -> bool:
    """Whether the samples of a step come in groups."""
    return bool(len(indices)) and not isinstance(indices[0], int | np.integer)


def flat(indices: Sequence[int] | Sequence[Sequence[int]]) -> list[int]:
    """All samples of a step."""
    if is_grouped(indices):
        return [index for group in cast(Sequence[Sequence[int]], indices) for index in group]
    return list(cast(Sequence[int], indices))


def split_evenly(samples: Sequence, parts: int) -> list[list]:
    """``samples`` cut into ``parts`` runs whose lengths differ by at most one, none empty
    (fewer runs when there are fewer samples)."""
    parts = min(parts, len(samples))
    cuts = [len(samples) * part // parts for part in range(parts + 1)] if parts else [0]
    return [list(samples[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
