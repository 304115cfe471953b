"""What a scan of a data set found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from raymm.scheduler.minibatch.problem import SampleSizes

Units = Callable[[np.ndarray], np.ndarray]  # from (M, 3) items to (M,) whole units


@dataclass(frozen=True, eq=False)
class SampleScan:
    """What a scan found. N samples, M items of a modality in the order of their samples.

    Attributes:
        text_tokens: (N,) int64, within ``max_length``; 0 where ``unusable``.
        counts: modality -> (N,) int64, items; 0 where ``unusable``.
        items: modality -> (M, 3) int64: of an image (width, height, frames, which is 1 except
            for items made of frames), of a sound (length in frames, Hz, channels), of anything
            else zeros; of what a whole model's processor makes, (numbers that its tower is given,
            1, 1).
        sources: (N,) int64, number of the source in ``source_names``.
        source_names: names of the sources.
        unusable: (K,) int64, samples that cannot be used, ascending.
        reasons: why, K of them.
    """

    text_tokens: np.ndarray
    counts: dict[str, np.ndarray]
    items: dict[str, np.ndarray]
    sources: np.ndarray
    source_names: tuple[str, ...]
    unusable: np.ndarray
    reasons: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.text_tokens)

    def seconds(self, modality: str) -> np.ndarray:
        """(M,) float64, length of every sound of a modality."""
        frames, rate = self.items[modality][:, 0], self.items[modality][:, 1]
        return frames / np.maximum(rate, 1)

    def sizes(self, units: Mapping[str, Units] | None = None) -> SampleSizes:
        """Sizes to plan mini-batches from: a column per modality, then ``"text"`` in tokens.

        Args:
            units: modality -> function from its (M, 3) ``items`` to (M,) whole units, for
                example tiles of an image. Without one, every item is one unit.
        """
        columns = []
        for name, counts in self.counts.items():
            function = (units or {}).get(name)
            items = self.items[name]
            each = np.ones(len(items), np.int64) if function is None else function(items)
            owner = np.repeat(np.arange(len(self)), counts)
            sums = np.zeros(len(self), np.int64)
            np.add.at(sums, owner, np.asarray(each, np.int64))
            columns.append(sums)
        values = np.stack([*columns, self.text_tokens], axis=1)
        return SampleSizes((*self.counts, "text"), values, self.sources, ("text",))
