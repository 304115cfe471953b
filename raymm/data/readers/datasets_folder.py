"""Reader of folders written by ``datasets.Dataset.save_to_disk``."""

from typing import Any

import numpy as np

from raymm.data.readers.arrow_rows import (
    ColumnPlan,
    count_column,
    index_batch,
    plan_columns,
    row_of,
)
from raymm.data.readers.base import Reader
from raymm.data.readers.row_index import ProgressReport, RowIndex
from raymm.data.remote.path import DataPath, RemotePath
from raymm.errors import DataError
from raymm.packages import require

STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"
_COUNT_ROWS = 100  # rows of a media column that are counted at a time


class DatasetsFolder(Reader):
    """Samples of a local ``datasets`` folder, memory-mapped. Media stay encoded, and media URLs are
    not fetched. Media paths are relative to the folder. Needs the package ``datasets``."""

    checked_when_opened = False  # the text may not be read before a row is requested

    def _open(self, report: ProgressReport) -> None:
        if isinstance(self.path, RemotePath):
            raise DataError(
                f"{self.path}: a folder of datasets is mapped into memory and cannot be read by "
                "URL; accepted: a local path, or Parquet by URL (Dataset.to_parquet)"
            )
        if (self.path / SPLITS_FILE).is_file():
            splits = sorted(file.parent.name for file in self.path.glob(f"*/{STATE_FILE}"))
            raise DataError(
                f"{self.path} contains the splits {splits}; name one, like {self.path / splits[0]}"
                if splits else f"{self.path} contains no split"
            )
        if not (self.path / STATE_FILE).is_file():
            raise DataError(f"{self.path} is not a folder written by save_to_disk of datasets")
        self.files = sorted(file for file in self.path.iterdir() if file.is_file())
        self._index(self._loaded(), report)

    def _index(self, rows: Any, report: ProgressReport) -> None:
        """Check the columns of a ``datasets.Dataset``, and count items."""
        self._rows = None
        self._length = len(rows)
        self._check_columns(set(rows.column_names))
        plan = plan_columns(rows.features.arrow_schema, self.options, self.path)
        self._used = plan.used
        if plan.scan:
            self._use(self._stored(lambda: self._build(rows, plan, report)))
        else:
            self._use(self._build(rows, plan, report))
        for name in plan.unused:
            self.survey.unused.setdefault(name, str(self.path))

    def _build(self, rows: Any, plan: ColumnPlan, report: ProgressReport) -> RowIndex:
        index = RowIndex(self.options)
        folders = self._media_folders(0)
        counts = {modality: self._count(rows, column) for column, modality in plan.media.items()}
        if self.options.survey:
            index.survey.add_media(counts, plan.frames, str(self.path))
        if not plan.scan:
            index.add_counts(counts, len(rows), plan.forms[0])
            return index.finish()
        counts = {name: values for name, values in counts.items() if name in index.counts}
        selected = rows.select_columns(plan.text)
        for start in range(0, len(rows), _COUNT_ROWS):
            table = selected[start : start + _COUNT_ROWS]
            batch_counts = {
                name: values[start : start + _COUNT_ROWS] for name, values in counts.items()
            }
            index_batch(index, table, batch_counts, start, str(self.path), folders)
            report(len(index), len(index) / len(rows))
        return index.finish()

    def _count(self, rows: Any, column: str) -> np.ndarray:
        frames = any(
            name in self.options.frames
            for name, media_column in self.columns.items() if media_column == column
        )
        counts = [np.zeros(0, np.int32)]
        selected = rows.select_columns([column])
        for start in range(0, len(rows), _COUNT_ROWS):
            table = selected[start : start + _COUNT_ROWS]
            for chunk in table.column(0).chunks:
                counts.append(count_column(_storage(chunk), column, frames))
        return np.concatenate(counts)

    def _loaded(self):
        """Load the ``datasets.Dataset``, with rows as Arrow tables."""
        datasets = datasets_package()
        try:
            return datasets.load_from_disk(str(self.path)).with_format("arrow")
        except Exception as error:  # errors of Arrow, JSON and datasets
            raise DataError(f"{self.path} cannot be loaded by datasets: {error}") from None

    def _opened(self):
        """Return the used columns of the ``datasets.Dataset``, which is loaded once."""
        if self._rows is None:
            rows = self._loaded()
            self._rows = rows.select_columns(self._used)
        return self._rows

    def __len__(self) -> int:
        return self._length

    def _row(self, index: int) -> dict:
        rows = self._opened()
        if len(rows) != self._length:
            raise ValueError(f"it has {len(rows)} rows instead of {self._length}")
        return row_of(rows[index : index + 1], 0, self.options.limits)

    def place(self, index: int) -> str:
        return f"{self.path}[{index}]"

    @property
    def folder(self) -> DataPath:
        return self.path

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_rows": None}


def datasets_package() -> Any:
    """Return the package ``datasets``; raise a ``ConfigError`` if it is not installed."""
    return require("datasets", "datasets", "a folder of save_to_disk, or a data set of the hub,")


def _storage(values):
    """Return the plain array of an extension type."""
    return getattr(values, "storage", values)
