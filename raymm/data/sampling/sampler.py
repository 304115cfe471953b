"""Samples of a step, and their assignment to microbatches, from metadata only."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from raymm.errors import DataError

# {"epoch": e, "position": samples of that epoch already taken}. Planned steps have a different
# state (``raymm.data.sampling.group_sampler``). Plain JSON.
State = dict[str, Any]
START: State = {"epoch": 0, "position": 0}


class EpochSampler:
    """Deterministic, endless stream of sample indices.

    Epoch ``e`` is a permutation from a NumPy generator seeded with (seed, e), or the file order.
    Steps cross epoch boundaries: the last samples of an epoch share a step with the first samples
    of the next, so every epoch contains each sample exactly once.

    Args:
        batch_size: samples per step, > 0; may exceed ``length``.
        shuffle: True to permute every epoch, False for file order.
    """

    def __init__(self, length: int, batch_size: int, shuffle: bool = True, seed: int = 0):
        self.length, self.batch_size, self.shuffle, self.seed = length, batch_size, shuffle, seed

    def order(self, epoch: int) -> np.ndarray:
        """Return the sample indices of an epoch in order, (N,) int64."""
        if not self.shuffle:
            return np.arange(self.length)
        return np.random.default_rng([self.seed, epoch]).permutation(self.length)

    def batches(self, state: State | None = None) -> Iterator[tuple[list[int], State]]:
        """Yield (indices of one step, state after the step) endlessly; errors are those of
        :meth:`check`."""
        epoch, position = self.check(state)
        order = self.order(epoch)
        while True:
            indices: list[int] = []
            while len(indices) < self.batch_size:
                chunk = order[position : position + self.batch_size - len(indices)]
                indices.extend(chunk.tolist())
                position += len(chunk)
                if position == self.length:
                    epoch, position = epoch + 1, 0
                    order = self.order(epoch)
            yield indices, {"epoch": epoch, "position": position}

    def one_pass(self, state: State | None = None) -> Iterator[tuple[list[int], State]]:
        """Yield the same until the end of the epoch; the last step may be smaller."""
        epoch, position = self.check(state)
        order = self.order(epoch)
        while position < self.length:
            indices = order[position : position + self.batch_size].tolist()
            position += len(indices)
            is_last = position == self.length
            yield indices, {"epoch": epoch + is_last, "position": 0 if is_last else position}

    def check(self, state: State | None) -> tuple[int, int]:
        """Return (epoch, position) of a state; None is the beginning. Raise a ``DataError`` if the
        state does not fit this dataset."""
        state = START if state is None else state
        if "step" in state:
            raise DataError(
                f"data.train has no weights, but data position {state} belongs to a run with "
                "weighted sources; resume with the weights, or start a new run"
            )
        if "taken" in state:
            raise DataError(
                f"data.batching is 'random', but data position {state} belongs to a run with "
                "planned steps; resume with the same data.batching, or start a new run"
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
    """Sort ``indices`` so that samples with the same modalities are adjacent, text-only samples
    last. Microbatches cut in this order often contain no items of some modality, so that its
    encoder has nothing to compute. The sort is stable. The gradient of a step does not depend on
    the order, because the loss is a sum over the label tokens of the entire step."""
    return sorted(indices, key=lambda i: [counts[name][i] == 0 for name in counts])


def is_grouped(indices: Sequence[int] | Sequence[Sequence[int]]) -> bool:
    return bool(len(indices)) and not isinstance(indices[0], int | np.integer)


def flat(indices: Sequence[int] | Sequence[Sequence[int]]) -> list[int]:
    """Return all samples of a step as one list."""
    if is_grouped(indices):
        return [index for group in cast(Sequence[Sequence[int]], indices) for index in group]
    return list(cast(Sequence[int], indices))


def split_evenly(samples: Sequence, parts: int) -> list[list]:
    """Split ``samples`` into ``parts`` non-empty runs whose lengths differ by at most one; fewer
    runs if there are fewer samples."""
    parts = min(parts, len(samples))
    cuts = [len(samples) * number // parts for number in range(parts + 1)] if parts else [0]
    return [list(samples[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
