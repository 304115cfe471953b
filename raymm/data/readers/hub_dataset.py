"""Reader of datasets on the Hugging Face hub."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raymm.data.readers.base import ReaderOptions
from raymm.data.readers.datasets_folder import DatasetsFolder, datasets_package
from raymm.data.readers.row_index import Progress, ProgressReport
from raymm.data.remote.path import DataPath
from raymm.data.samples.source_config import HUB
from raymm.errors import DataError

_COMMIT = re.compile("[0-9a-f]{40}")


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
        self._index(rows, report)

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
