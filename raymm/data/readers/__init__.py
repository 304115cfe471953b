"""Readers of data files: one small interface, a format per file.

A reader has ``len``, ``reader[index] -> Sample``, ``counts``, ``sources`` and ``names``; see
``raymm.data.readers.base``.
"""

from collections.abc import Iterable
from pathlib import Path

from raymm.data.readers.base import Reader, ReaderOptions
from raymm.data.readers.datasets_folder import SPLITS_FILE, STATE_FILE, DatasetsFolder
from raymm.data.readers.hub_dataset import HubDataset
from raymm.data.readers.json_rows import JsonDataset
from raymm.data.readers.mixture import Mixture
from raymm.data.readers.parquet import ParquetDataset
from raymm.data.readers.repeated import Repeated
from raymm.data.readers.tar_shards import TarDataset
from raymm.data.remote.path import DataPath, RemotePath, located
from raymm.data.samples.errors import DataError
from raymm.data.samples.source_config import HUB

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


def format_of(path: str | Path) -> str:
    """The format of a file, folder or glob, by suffix; a folder by what is in it.

    Raises:
        DataError: it does not exist, or nothing tells.
    """
    if str(path).startswith(HUB):
        return "hub"
    place = located(path)
    if isinstance(place, RemotePath):
        return _remote_format(place)
    path = Path(path)
    if path.suffix in _SUFFIXES and not path.is_dir():
        return _SUFFIXES[path.suffix]
    if path.is_dir():
        if (path / STATE_FILE).is_file() or (path / SPLITS_FILE).is_file():
            return "datasets"
        return _format_within(path, path.rglob("*"))
    if path.is_file():
        return "json"  # as before there were others
    raise DataError(f"data file {str(path)!r} does not exist (looked for {path.absolute()})")


def _remote_format(path: RemotePath) -> str:
    if path.suffix in _SUFFIXES:
        return _SUFFIXES[path.suffix]
    if path.is_file():
        return "json"
    files = path.files() if path.url.in_bucket else []
    if not files:
        raise DataError(f"data file {str(path)!r} does not exist")
    return _format_within(path, files)


def _format_within(folder: DataPath, files: Iterable[DataPath]) -> str:
    """The format of the files in a folder."""
    formats = {_SUFFIXES[file.suffix] for file in files if file.suffix in _SUFFIXES}
    formats -= {"json"}  # a folder of shards often has a description beside them
    if len(formats) == 1:
        return formats.pop()
    raise DataError(
        f"folder {str(folder)!r} has "
        + (f"files of {sorted(formats)}" if formats else "no .parquet or .tar file")
        + f"; say 'format', one of {sorted(FORMATS)}"
    )


def open_source(
    path: str | Path, format: str | None = None, options: ReaderOptions | None = None
) -> Reader:
    """A reader of one source.

    Args:
        path: file, folder or glob, or its URL.
        format: a key of ``FORMATS``; by ``format_of`` if None.
        options: columns, limits and the like.

    Raises:
        DataError: what ``format_of`` and the reader raise.
    """
    if format is not None and format not in FORMATS:
        raise DataError(f"format must be one of {sorted(FORMATS)}, got {format!r}")
    try:
        return FORMATS[format or format_of(path)](path, None, options)
    except DataError:
        raise
    except ValueError as error:  # a URL of another kind
        raise DataError(f"data source {str(path)!r}: {error}") from None
    except (OSError, RuntimeError) as error:  # pathlib's, of links in a circle
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"data file {str(path)!r} cannot be read: {reason}") from error
