"""Sources whose samples come more or less often than once per epoch, and mixtures of sources."""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from raymm.data.readers.base import Reader, ReaderOptions
from raymm.data.remote.path import DataPath
from raymm.data.samples.sample import Sample
from raymm.errors import DataError


class Repeated:
    """Samples of a reader, each ``repeat`` times. Picklable; does not hold the rows.

    N samples become ``repeat * N``, rounded to the nearest whole number: each sample comes
    ``floor(repeat)`` times, and a random part of them once more. The part depends on the seed, the
    name of the source and N, and is the same in every epoch.

    Args:
        repeat: above 0; a number of samples that rounds to 0 raises a ``DataError``.
        seed: seed of the random part, >= 0.
        rows: indices of the samples of the reader to use, in order; by default all.

    Attributes:
        rows: (M,) int64, the sample of the reader for each index: pass after pass in the order of
            the reader.
        counts: modality -> (M,) int32, items per sample.
    """

    def __init__(
        self, reader: Reader, repeat: float, seed: int = 0, rows: np.ndarray | None = None
    ) -> None:
        self.reader = reader
        rows = np.arange(len(reader)) if rows is None else rows
        repeats, extra = divmod(int(np.floor(repeat * len(rows) + 0.5)), len(rows))
        if not repeats and not extra:
            raise DataError(
                f"repeat {repeat:g} of source {reader.name!r} leaves none of its {len(rows)} "
                f"samples; accepted: {0.5 / len(rows):g} or more"
            )
        generator = np.random.default_rng([seed, zlib.crc32(reader.name.encode())])
        chosen = np.sort(generator.choice(len(rows), extra, replace=False))
        self.rows = np.concatenate([*[rows] * repeats, rows[chosen]]).astype(np.int64)
        self.counts = {name: counts[self.rows] for name, counts in reader.counts.items()}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        """Read sample ``index``; negative indices count from the end. Errors are those of the
        reader."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} rows of {self.path}")
        index = int(index) % len(self)
        return replace(self.reader[int(self.rows[index])], index=index)

    @property
    def name(self) -> str:
        return self.reader.name

    @property
    def names(self) -> tuple[str, ...]:
        return self.reader.names

    @property
    def sources(self) -> np.ndarray:
        """(M,) int64 zeros, because all samples have the same source."""
        return np.zeros(len(self), np.int64)

    @property
    def path(self) -> DataPath:
        return self.reader.path

    @property
    def files(self) -> Sequence[DataPath]:
        return self.reader.files

    @property
    def columns(self) -> Mapping[str, str]:
        return self.reader.columns

    @property
    def options(self) -> ReaderOptions:
        return self.reader.options

    @property
    def digest(self) -> str:
        """Hex digest of ``rows``."""
        return hashlib.sha256(self.rows.tobytes()).hexdigest()


class Mixture:
    """Samples of several readers, one source after the other. Picklable; does not hold the rows.

    Args:
        readers: at least one; equal names raise a ``DataError``.

    Attributes:
        sources: (N,) int64, source number of every sample.
        counts: modality -> (N,) int32, items per sample.
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
