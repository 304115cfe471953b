"""Base class of all readers.

A subclass locates the rows of its format; this module parses text and media, and reports errors.
"""

from __future__ import annotations

import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from raymm.data.readers.files import COMPRESSED
from raymm.data.readers.row_index import (
    Progress,
    ProgressReport,
    ReaderOptions,
    RowIndex,
    Survey,
    check_unused,
    stored_index,
)
from raymm.data.remote.path import DataPath, RemotePath, located
from raymm.data.samples.folders import MediaFolders
from raymm.data.samples.media import Sample
from raymm.data.samples.rows import ID, TEXT_ROLES, parse_row
from raymm.errors import DataError, SampleError


class Reader(ABC):
    """Samples of one source, by index. Readers are picklable and do not hold the rows.

    Subclasses index their files in ``_open``, and return rows from ``_row``.

    Args:
        path: file, folder or glob, or its URL.
        columns: modality -> its column (see ``raymm.data.samples.row_media.items_of`` for accepted
            values).
        options: all other options; its ``columns`` are used if ``columns`` is None.
        progress: called while the source is read; see ``Progress``.

    Raises:
        DataError: the source does not exist, has no rows, a malformed row (with ``skip``, reading
            the row raises a ``SampleError`` instead), a column that no row has, or a column that
            nothing uses.

    Attributes:
        counts: modality -> (N,) int32, items per sample; 0 for unusable rows.
        survey: summary of the rows that were read while opening.
    """

    # True if every row is checked while the source is opened. A row that is unusable later must
    # have changed since.
    checked_when_opened = True

    def __init__(
        self,
        path: str | DataPath,
        columns: Mapping[str, str] | None = None,
        options: ReaderOptions | None = None,
        progress: Progress | None = None,
    ):
        self.path: DataPath = located(path)
        options = options or ReaderOptions()
        self.options = options if columns is None else replace(options, columns=dict(columns))
        self.columns = dict(self.options.columns)
        self.name = self.options.name or _stem(self.path)
        self.counts: dict[str, np.ndarray] = {}
        self.files: Sequence[DataPath] = (self.path,)
        self.survey = Survey()
        self._bad: dict[int, SampleError] = {}
        self._open(ProgressReport(self.path, progress))
        if not len(self):
            raise DataError(f"data file {self.path} has no samples")
        if not self.options.survey:
            check_unused(self.survey, self.options, self.path)

    @abstractmethod
    def _open(self, report: ProgressReport) -> None:
        """Index the files; set ``counts``, ``survey`` and ``files``."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _row(self, index: int) -> dict:
        """Return the values of a row by column (media as accepted by ``items_of``). Raise a
        ``SampleError`` if the row cannot be read, or is too large, and an ``OSError`` or
        ``ValueError`` if the file has changed since it was opened."""

    @abstractmethod
    def place(self, index: int) -> str:
        """Return the location of a row, for errors."""

    @property
    def sources(self) -> np.ndarray:
        """(N,) int64 zeros, because all samples have the same source."""
        return np.zeros(len(self), np.int64)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def folder(self) -> DataPath:
        """Folder of the source; relative media paths start here."""
        local = not isinstance(self.path, RemotePath)
        return self.path if local and self.path.is_dir() else self.path.parent

    def __getitem__(self, index: int) -> Sample:
        """Read sample ``index``; negative indices count from the end.

        Raises:
            IndexError: the index is out of range.
            SampleError: the row is unusable.
            DataError: the file has changed since it was opened.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {self.path}, which has {len(self)}")
        index = int(index) % len(self)
        location = self.place(index)
        if index in self._bad:
            raise self._sample_error(location, location, self._bad[index])
        sample_id = location
        try:
            row = self._row(index)
            if not isinstance(row, dict):
                raise SampleError(f"a sample is a JSON object, got {type(row).__name__}")
            value = row.get(self.options.text_columns.get(ID, ID))
            sample_id = location if value is None else str(value)
            folders = self._media_folders(index)
            parsed = parse_row(row, self.options, folders, location)
            self._check_links(parsed.media, folders, parsed.column)
        except (OSError, ValueError) as error:
            if isinstance(error, DataError) and not isinstance(error, SampleError):
                raise
            # Links of files are only checked here, so they are errors of the sample.
            if isinstance(error, SampleError) and (error.outside or not self.checked_when_opened):
                raise self._sample_error(sample_id, location, error) from None
            from raymm.actors.faults.failure_kind import failure_kind  # imports torch

            passes = failure_kind(error).passes
            reason = "cannot be read now" if passes else "changed while the run was reading it"
            raise DataError(f"{location} {reason}: {error}") from error
        text = parsed.text
        role = "messages" if text.text is None else "text"
        return Sample(
            index, sample_id, text.messages, text.text, parsed.media, self.name, location,
            text.preference,
            {
                **self.options.text_columns, role: parsed.column, **self.columns,
                **dict.fromkeys(parsed.inline, parsed.column),
            },
            text.tools, text.template, text.prompt_characters,
        )

    def _check_links(
        self, media: Mapping[str, tuple], folders: MediaFolders, text_column: str
    ) -> None:
        for modality, items in media.items():
            for item in items:
                for file in item if isinstance(item, tuple) else (item,):
                    if isinstance(file, str):
                        folders.check(file, self.columns.get(modality, text_column))

    def _media_folders(self, index: int) -> MediaFolders:
        return MediaFolders(self.folder, self.options.media_folders)

    def _sample_error(self, sample_id: str, place: str, error: SampleError) -> SampleError:
        return SampleError(error.reason, error.column, error.path, sample_id, place)

    def _stored(self, build: Callable[[], RowIndex]) -> RowIndex:
        """Return the stored index of a large source, or build a new one."""
        return stored_index((type(self).__name__, str(self.path)), self.options, self.files, build)

    def _use(self, index: RowIndex) -> None:
        """Adopt the counts, the unusable rows and the summary of an index."""
        self.counts, self._bad, self.survey = index.counts, index.bad, index.survey

    def _check_columns(self, present: set[str]) -> None:
        """Raise a ``DataError`` for a configured column that no row has."""
        for modality, column in self.columns.items():
            if column not in present:
                raise DataError(
                    f"column {column!r} (modality {modality!r}) is in no row of {self.path}; "
                    f"its columns are {sorted(present)}. For a source without this modality, set "
                    f"data.train: [{{path: {self.path.name}, columns: {{{modality}: null}}}}]"
                )
        for role in TEXT_ROLES:
            column = self.options.text_columns.get(role)
            if column is not None and column not in present:
                raise DataError(
                    f"column {column!r} ({role}) is in no row of {self.path}; its columns are "
                    f"{sorted(present)}"
                )


def _stem(path: DataPath) -> str:
    """Return the name of a file without suffix, and without the suffix of its compression."""
    return Path(path.stem).stem if path.suffix in COMPRESSED else path.stem


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
