"""What every reader of a format does alike: index a source once, hand out samples of it.

A reader of a format says how its rows are found; text, media and errors are treated here.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raymm.data.remote.path import DataPath, RemotePath, located
from raymm.data.samples.errors import DataError, RowError, SampleError
from raymm.data.samples.folders import MediaFolders, OutsideError
from raymm.data.samples.limits import Limits
from raymm.data.samples.rows import ID, TEXT_ROLES, count_items, items_of, text_of
from raymm.data.samples.sample import Sample


@dataclass(frozen=True)
class ReaderOptions:
    """What a reader needs to know besides the path.

    Attributes:
        name: of the source; every sample carries it.
        columns: modality -> its column.
        text_columns: ``"text"``, ``"messages"``, ``"prompt"``, ``"chosen"``, ``"rejected"``,
            ``"id"`` -> column, where it has another name.
        frames: modalities whose items are lists of frames.
        media_folders: where rows may name files, besides the source's own folder.
        subset, split, revision: of a data set by name
            (:class:`raymm.data.readers.hub_dataset.HubDataset`).
        skip: keep rows that cannot be used, and raise only when they are read.
        limits: of items.
    """

    name: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    text_columns: Mapping[str, str] = field(default_factory=dict)
    frames: frozenset[str] = frozenset()
    media_folders: tuple[str, ...] = ()
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    skip: bool = False
    limits: Limits = Limits()


class Reader(ABC):
    """Samples of one source, by index. Picklable, without the rows.

    Subclasses index their files in ``_open``, and give rows by ``_row``.

    Args:
        path: the file, folder or glob, or its URL.
        columns: modality -> its column (see ``raymm.data.samples.rows.items_of`` for what may be
            in it).
        options: everything else; its ``columns`` are used where ``columns`` is None.

    Raises:
        DataError: no such file, no rows, a malformed row (with ``skip``, reading it raises
            ``SampleError`` instead), or a column that no row has.

    Attributes:
        path: absolute, or remote.
        name: of the source.
        counts: modality -> (N,) int32, items per sample; 0 for rows that cannot be used.
        files: the files that it reads, absolute.
    """

    # Whether every row is read while the source is opened; what is wrong with one later has
    # become wrong since.
    checked_when_opened = True

    def __init__(
        self,
        path: str | DataPath,
        columns: Mapping[str, str] | None = None,
        options: ReaderOptions | None = None,
    ):
        self.path: DataPath = located(path)
        self.options = options or ReaderOptions()
        self.columns = dict(self.options.columns if columns is None else columns)
        self.name = self.options.name or self.path.stem
        self.counts: dict[str, np.ndarray] = {}
        self.files: Sequence[DataPath] = (self.path,)
        self._bad: dict[int, RowError] = {}
        self._open()
        if not len(self):
            raise DataError(f"data file {self.path} has no samples")

    @abstractmethod
    def _open(self) -> None:
        """Index the files; sets ``counts`` (with ``_check_rows`` or otherwise)."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _row(self, index: int) -> dict:
        """Column -> value of a row (media as ``items_of`` takes them).

        Raises:
            RowError: the row cannot be read, or is too large to.
            OSError, ValueError: the file is not what it was when it was opened.
        """

    @abstractmethod
    def place(self, index: int) -> str:
        """Where a row is, for errors."""

    @property
    def sources(self) -> np.ndarray:
        """(N,) int64 zeros: all samples are of one source."""
        return np.zeros(len(self), np.int64)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources, here one."""
        return (self.name,)

    @property
    def folder(self) -> DataPath:
        """What relative media paths are relative to."""
        local = not isinstance(self.path, RemotePath)
        return self.path if local and self.path.is_dir() else self.path.parent

    def __getitem__(self, index: int) -> Sample:
        """Read sample ``index``; negative counts from the end.

        Raises:
            IndexError: out of range.
            SampleError: the row cannot be used.
            DataError: the file changed since it was opened.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {self.path}, which has {len(self)}")
        index = int(index) % len(self)
        place = self.place(index)
        if index in self._bad:
            raise self._sample_error(place, place, self._bad[index])
        sample_id = place
        try:
            row = self._row(index)
            value = row.get(self.options.text_columns.get(ID, ID))
            sample_id = place if value is None else str(value)
            messages, text, preference = text_of(row, self.options.text_columns)
            media = {}
            for modality, column in self.columns.items():
                items = self._items(modality, row.get(column), column, place)
                if items:
                    media[modality] = items
        except (RowError, OSError, ValueError) as error:
            # Links are looked at when they are read.
            of_row = isinstance(error, OutsideError) or not self.checked_when_opened
            if isinstance(error, RowError) and of_row:
                raise self._sample_error(sample_id, place, error) from None
            raise DataError(f"{place} changed while the run was reading it: {error}") from error
        return Sample(
            index, sample_id, messages, text, media, self.name, place, preference,
            {**self.options.text_columns, **self.columns},
        )

    def _items(self, modality: str, value: object, column: str, place: str) -> tuple:
        folders = self._media_folders
        items = items_of(value, column, folders, place, modality in self.options.frames)
        for item in items:
            for file in item if isinstance(item, tuple) else (item,):
                if isinstance(file, str):
                    folders.check(file, column)
        return items

    @property
    def _media_folders(self) -> MediaFolders:
        return MediaFolders(self.folder, self.options.media_folders)

    def _sample_error(self, sample_id: str, place: str, error: RowError) -> SampleError:
        return SampleError(sample_id, error.file, error.reason, error.column, place)

    def _checked_counts(self, place: str, index: int, row: Any) -> dict[str, int]:
        """Items per modality of a row while it is indexed.

        Raises:
            DataError: the row cannot be used (without ``skip``; with it, that is noted).
        """
        try:
            if isinstance(row, RowError):
                raise row
            text_of(row, self.options.text_columns)
            return {
                modality: count_items(
                    row.get(column), column, self._media_folders, modality in self.options.frames
                )
                for modality, column in self.columns.items()
            }
        except RowError as error:
            self._reject(place, index, error)
            return dict.fromkeys(self.columns, 0)

    def _reject(self, place: str, index: int, error: RowError) -> None:
        if not self.options.skip:
            where = f", file {error.file}" if error.file else ""
            raise DataError(f"{place}{where}: {error.reason}") from None
        self._bad[index] = error

    def _check_columns(self, present: set[str]) -> None:
        """
        Raises:
            DataError: a column of a modality that is not among those present.
        """
        for modality, column in self.columns.items():
            if column not in present:
                raise DataError(
                    f"column {column!r} (modality {modality!r}) is in no row of {self.path}; "
                    f"its columns are {sorted(present)}. For a source of text alone say so: "
                    f"data.train: [{{path: {self.path.name}, columns: {{{modality}: null}}}}]"
                )
        for role in TEXT_ROLES:
            column = self.options.text_columns.get(role)
            if column is not None and column not in present:
                raise DataError(
                    f"column {column!r} ({role}) is in no row of {self.path}; its columns are "
                    f"{sorted(present)}"
                )
