"""Result of scanning a dataset."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from raymm.scheduler.minibatch.problem import SampleSizes

Units = Callable[[np.ndarray], np.ndarray]  # from (M, 3) items to (M,) whole units


@dataclass(frozen=True, eq=False)
class SampleScan:
    """Sizes of N samples, with the M items of each modality in the order of their samples.

    Attributes:
        text_tokens: (N,) int64, at most ``max_length``; 0 for unusable samples.
        counts: number of items per sample by modality, (N,) int64; 0 for unusable samples.
        items: sizes of items by modality, (M, 3) int64: (width, height, frames) of an image, with 1
            frame unless the item is a list of frames; (frames, Hz, channels) of a sound; (values
            passed to the tower, 1, 1) for the processor of a Hugging Face VLM; zeros otherwise.
        sources: (N,) int64, index into ``source_names``.
        unusable: (K,) int64, indices of unusable samples, ascending.
        reasons: error messages of the K unusable samples.
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
        """Return the length of every sound of a modality in seconds, (M,) float64."""
        frames, rate = self.items[modality][:, 0], self.items[modality][:, 1]
        return frames / np.maximum(rate, 1)

    def sizes(self, units: Mapping[str, Units] | None = None) -> SampleSizes:
        """Return the sizes for planning mini-batches: a column per modality, then ``"text"`` in
        tokens.

        Args:
            units: by modality, a function from (M, 3) ``items`` to (M,) whole units, for example
                the tiles of an image. By default, every item is one unit.
        """
        columns = []
        for name, counts in self.counts.items():
            function = (units or {}).get(name)
            items = self.items[name]
            item_sizes = np.ones(len(items), np.int64) if function is None else function(items)
            owner = np.repeat(np.arange(len(self)), counts)
            sums = np.zeros(len(self), np.int64)
            np.add.at(sums, owner, np.asarray(item_sizes, np.int64))
            columns.append(sums)
        values = np.stack([*columns, self.text_tokens], axis=1)
        return SampleSizes((*self.counts, "text"), values, self.sources, ("text",))
