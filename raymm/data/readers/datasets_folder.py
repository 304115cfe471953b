"""Readers of folders written by ``datasets.Dataset.save_to_disk``, and of datasets on the hub."""

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from raymm.data.readers.arrow_rows import ArrowReader, plan_columns, row_of
from raymm.data.readers.row_index import Progress, ProgressReport, ReaderOptions
from raymm.data.remote.path import DataPath, RemotePath
from raymm.data.samples.source_config import HUB
from raymm.errors import DataError
from raymm.packages import require

_COMMIT = re.compile("[0-9a-f]{40}")


STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"
_COUNT_ROWS = 100  # rows that are indexed at a time


class DatasetsFolder(ArrowReader):
    """Samples of a local ``datasets`` folder, memory-mapped. Media stay encoded, and media URLs are
    not fetched. Media paths are relative to the folder. Needs the package ``datasets``."""

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
        self._index_rows(self._loaded(), report)

    def _index_rows(self, rows: Any, report: ProgressReport) -> None:
        """Check the columns of a ``datasets.Dataset``, and count items."""
        self._rows, self._length = rows, len(rows)
        self._check_columns(set(rows.column_names))
        plan = plan_columns(rows.features.arrow_schema, self.options, self.path)
        self._used = plan.used
        self._index([(self.path, plan, len(rows))], report)
        self._rows = None

    def _opened_part(self, number: int) -> AbstractContextManager[Any]:
        return nullcontext(self._rows)

    def _batches(self, part: Any, number: int, columns: list[str]) -> Iterator[Any]:
        selected = part.select_columns(columns)
        for start in range(0, len(part), _COUNT_ROWS):
            yield selected[start : start + _COUNT_ROWS]

    def _media(self, part: Any, number: int, column: str) -> Iterator[Any]:
        for table in self._batches(part, number, [column]):
            for chunk in table.column(0).chunks:
                yield getattr(chunk, "storage", chunk)  # the plain array of an extension type

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


class HubDataset(DatasetsFolder):
    """Samples of ``hf://datasets/ORG/NAME``. Opening the source downloads it with ``datasets`` into
    its cache (``HF_HOME``) unless it is there; rows are then read as in :class:`DatasetsFolder`.
    Dataset scripts are not run. A node without the cached files downloads the same commit."""

    def __init__(
        self, path: str | DataPath, columns: Mapping[str, str] | None = None,
        options: ReaderOptions | None = None, progress: Progress | None = None,
    ) -> None:
        self._hub_name = str(path).removeprefix(HUB)
        super().__init__(path, columns, options, progress)

    def _open(self, report: ProgressReport) -> None:
        rows = self._fetched(self.options.revision)
        self.files = [Path(file["filename"]) for file in rows.cache_files]
        if not self.files:
            raise DataError(f"{self._url} has no rows in split {self.options.split!r}")
        self.path = self.files[0].parent
        commit = self.path.name if _COMMIT.fullmatch(self.path.name) else None
        self._commit = commit or self.options.revision
        self._index_rows(rows, report)

    @property
    def _url(self) -> str:
        return f"{HUB}{self._hub_name}"

    def _fetched(self, revision: str | None) -> Any:
        options, datasets = self.options, datasets_package()
        try:
            rows = datasets.load_dataset(
                self._hub_name, options.subset, split=options.split, revision=revision
            )
        except Exception as error:  # errors of the hub, the network, or the file formats
            raise DataError(
                f"{self._url}: datasets cannot load split {options.split!r}, subset "
                f"{options.subset!r} ({type(error).__name__}: {error}); accepted: a data set of "
                "the hub without a loading script, if the hub is reachable or the data set is "
                "cached; or a folder written by save_to_disk"
            ) from None
        return rows.with_format("arrow")

    def _loaded(self) -> Any:
        if not all(file.is_file() for file in self.files):
            return self._fetched(self._commit)
        datasets = datasets_package()
        shards = [datasets.Dataset.from_file(str(file)) for file in self.files]
        return datasets.concatenate_datasets(shards).with_format("arrow")
