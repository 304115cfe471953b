"""Several sources as one dataset."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from raymm.data.readers.base import Reader
from raymm.data.readers.repeated import Repeated
from raymm.data.samples.sample import Sample
from raymm.errors import DataError


class Mixture:
    """Samples of several readers, one source after the other. Picklable; does not hold the rows.

    Args:
        readers: at least one; equal names raise a ``DataError``.

    Attributes:
        sources: (N,) int64, source number of every sample.
        counts: modality -> (N,) int32, items per sample.
        path: paths of the sources, for messages.
        tells_sources: True if microbatches contain the source of their samples, for a loss per
            source.
    """

    tells_sources = True

    def __init__(self, readers: Sequence[Reader | Repeated]):
        self.readers = list(readers)
        self.names = tuple(reader.name for reader in self.readers)
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise DataError(f"two sources are named {twice[0]!r}; give each a different 'name'")
        self._starts = np.cumsum([0, *map(len, self.readers)])
        self.sources = np.repeat(np.arange(len(self.readers)), list(map(len, self.readers)))
        modalities = dict.fromkeys(name for reader in self.readers for name in reader.counts)
        self.counts = {
            name: np.concatenate(
                [r.counts.get(name, np.zeros(len(r), np.int32)) for r in self.readers]
            )
            for name in modalities
        }
        self.path = ", ".join(str(reader.path) for reader in self.readers)
        self.files = [file for reader in self.readers for file in reader.files]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Sample:
        """Read sample ``index``; negative indices count from the end. Errors are those of the
        readers."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} rows of {self.path}")
        index = int(index) % len(self)
        source = int(self.sources[index])
        sample = self.readers[source][index - int(self._starts[source])]
        return replace(sample, index=index)
