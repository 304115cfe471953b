"""Search for the data files of a path, folder or glob."""

import glob
from collections.abc import Sequence
from pathlib import Path

from raymm.data.readers.compressed import data_suffix
from raymm.data.remote.path import DataPath, RemotePath, located
from raymm.data.samples.source_config import HUB
from raymm.errors import DataError

# Files that describe the data of a folder, written by ``datasets`` and LLaMA-Factory.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "state.json")


def find_files(path: DataPath, suffixes: Sequence[str]) -> Sequence[DataPath]:
    """Return files with certain suffixes, sorted by name: the path itself, all files below a
    folder, or the matches of a glob. Hidden files and folders within a folder are ignored, as is
    the suffix of a compression. Raise a ``DataError`` if there are no such files."""
    if isinstance(path, RemotePath):
        return _remote_files(path, suffixes)
    if path.is_file():
        return [path]
    if path.is_dir():
        files = [file for file in visible_files(path) if data_suffix(file) in suffixes]
        path_kind = "folder"
    else:
        files = sorted(Path(file) for file in glob.glob(str(path), recursive=True))
        files = [file for file in files if file.is_file()]
        path_kind = "data file" if not glob.has_magic(str(path)) else "pattern"
    if not files:
        kinds = " or ".join(suffixes)
        missing = "does not exist" if path_kind == "data file" else f"has no {kinds} file"
        raise DataError(f"{path_kind} {str(path)!r} {missing}")
    return files


def visible_files(folder: Path) -> list[Path]:
    """Return the files below a folder that are not hidden, sorted by name."""
    return sorted(
        file for file in folder.rglob("*")
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.is_file()
    )


def _remote_files(path: RemotePath, suffixes: Sequence[str]) -> list[RemotePath]:
    if path.is_file():  # includes names that look like a pattern, as for local paths
        return [path]
    if path.has_magic():
        files, path_kind = path.matches(), "pattern"
    else:
        below = path.files() if path.url.in_bucket else []
        files = [file for file in below if data_suffix(file) in suffixes]
        path_kind = "folder" if below else "data file"
    if not files:
        kinds = " or ".join(suffixes)
        missing = "does not exist" if path_kind == "data file" else f"has no {kinds} file"
        raise DataError(f"{path_kind} {str(path)!r} {missing}")
    return files


def is_there(path: str | Path) -> bool:
    """Return True if a path or URL exists, or a glob matches a file; raise a ``DataError`` if a
    server does not answer."""
    if str(path).startswith(HUB):
        return True  # opening the dataset reports an error
    location = located(path)
    if isinstance(location, RemotePath):
        return location.is_file() or (
            bool(location.matches()) if location.has_magic() else location.is_dir()
        )
    return Path(path).exists() or bool(glob.glob(str(path), recursive=True))
