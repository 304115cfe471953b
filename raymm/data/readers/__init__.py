"""Readers of data files, one per format.

A reader has ``len``, ``reader[index] -> Sample``, ``counts``, ``sources`` and ``names``; see
``raymm.data.readers.base``.
"""

import glob
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from raymm.data.readers.base import Mixture, Reader, ReaderOptions, Repeated
from raymm.data.readers.datasets_folder import SPLITS_FILE, STATE_FILE, DatasetsFolder, HubDataset
from raymm.data.readers.files import DESCRIPTIONS, data_suffix, visible_files
from raymm.data.readers.json_rows import JsonDataset
from raymm.data.readers.parquet import ParquetDataset
from raymm.data.readers.row_index import Progress
from raymm.data.readers.tar_shards import TarDataset
from raymm.data.remote.path import DataPath, RemotePath, located, open_data, size_of
from raymm.data.samples.source_config import HUB
from raymm.errors import ConfigError, DataError

_LOGGER = logging.getLogger(__name__)

Dataset = Reader | Repeated | Mixture

FORMATS: dict[str, type[Reader]] = {
    "json": JsonDataset,
    "parquet": ParquetDataset,
    "tar": TarDataset,
    "datasets": DatasetsFolder,
    "hub": HubDataset,
}
_SUFFIXES = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".tar": "tar",
}
# Largest .json file, in bytes, that may be a description next to Parquet files or tar shards.
_MOST_DESCRIPTION = 2**20


def format_of(path: str | Path) -> str:
    """Return the format of a file, folder or glob by suffix; for a folder, by the files in it. In a
    folder of Parquet files or tar shards, ``.json`` files with one JSON object describe the data
    and are ignored. JSON lines and arrays next to other data are ambiguous. Raise a ``DataError``
    if the path does not exist, or contains files of several formats."""
    if str(path).startswith(HUB):
        return "hub"
    location = located(path)
    # The suffix of the link counts: its target may have none, as in the cache of the hub.
    suffix = data_suffix(location if isinstance(location, RemotePath) else Path(path))
    if isinstance(location, RemotePath):
        if suffix in _SUFFIXES:
            return _SUFFIXES[suffix]
        if location.is_file():
            return "json"
        files = location.files() if location.url.in_bucket else []
        if location.has_magic():
            files = location.matches()
        if not files:
            raise DataError(f"data file {str(location)!r} does not exist")
        return _format_within(location, files)
    path = Path(path)
    if suffix in _SUFFIXES and not path.is_dir():
        return _SUFFIXES[suffix]
    if path.is_dir():
        if (path / STATE_FILE).is_file() or (path / SPLITS_FILE).is_file():
            return "datasets"
        return _format_within(path, visible_files(path))
    if path.is_file():
        return "json"
    if files := [Path(file) for file in glob.glob(str(path), recursive=True)]:
        return _format_within(path, [file for file in files if file.is_file()])
    raise DataError(f"data file {str(path)!r} does not exist (looked for {path.absolute()})")


def _format_within(folder: DataPath, files: Sequence[DataPath]) -> str:
    files = [file for file in files if data_suffix(file) in _SUFFIXES]
    formats = {_SUFFIXES[data_suffix(file)] for file in files}
    if len(formats) > 1 and "json" in formats:
        texts = [file for file in files if _SUFFIXES[data_suffix(file)] == "json"]
        if all(map(_is_description, texts)):
            _LOGGER.info("skipping files that describe the data: %s", ", ".join(map(str, texts)))
            formats.remove("json")
    if len(formats) == 1:
        return formats.pop()
    if not formats:
        raise DataError(
            f"{str(folder)!r} contains no data files; accepted: files that end in "
            f"{', '.join(_SUFFIXES)}, also with .gz or .zst. For other names, set 'format' to one "
            f"of {sorted(FORMATS)}"
        )
    raise DataError(
        f"{str(folder)!r} has files of {sorted(formats)}; set 'format' to one of {sorted(FORMATS)}"
    )


def _is_description(file: DataPath) -> bool:
    """Return True for a file with one JSON object."""
    if file.name in DESCRIPTIONS:
        return True
    if file.suffix != ".json" or size_of(file) > _MOST_DESCRIPTION:
        return False
    try:
        with open_data(file) as opened:
            return isinstance(json.loads(opened.read()), dict)
    except DataError:  # a server failed
        raise
    except (OSError, ValueError, RecursionError):
        return False


def open_source(
    path: str | Path, format: str | None = None, options: ReaderOptions | None = None,
    progress: Progress | None = None,
) -> Reader:
    """Open a source. Raise a ``DataError`` if the format is unknown, or the source cannot be read.

    Args:
        path: file, folder or glob, or its URL.
        format: a key of ``FORMATS``; by ``format_of`` if None.
        progress: called about once per second while the source is read.
    """
    if format is not None and format not in FORMATS:
        raise DataError(f"format must be one of {sorted(FORMATS)}, got {format!r}")
    try:
        return FORMATS[format or format_of(path)](path, None, options, progress)
    except (DataError, ConfigError):
        raise
    except ValueError as error:  # the URL is not accepted
        raise DataError(f"data source {str(path)!r}: {error}") from None
    except (OSError, RuntimeError) as error:  # pathlib raises RuntimeError for circular links
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"data file {str(path)!r} cannot be read: {reason}") from error
