"""Data files of a path, folder or glob. Compressed files are decompressed once into a cache, so
that rows can be read by offset."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from raymm.data.remote.path import (
    SCAN_BLOCK,
    DataPath,
    RemotePath,
    located,
    open_data,
    size_of,
    version_of,
)
from raymm.data.samples.source_config import HUB
from raymm.errors import DataError
from raymm.packages import require

# Files that describe the data of a folder, written by ``datasets`` and LLaMA-Factory.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "state.json")
COMPRESSED = (".gz", ".zst")
# Compressed bytes per call of the decompressor; a few of them may expand to 128 KiB.
_ZSTD_BLOCK = 2**14
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def cache_folder(name: str) -> Path:
    """Return ``$RAYMM_CACHE/NAME``, or ``~/.cache/raymm/NAME``."""
    return Path(os.environ.get("RAYMM_CACHE") or Path.home() / ".cache" / "raymm") / name


@contextmanager
def written_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing, and move it to ``path`` at the end of the ``with`` block.
    After an error no file is left. The folder is created if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name[:16], suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def data_suffix(path: Any) -> str:
    """Return the suffix of a path or URL, ignoring the suffix of its compression."""
    name = path.name
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return Path(name).suffix


def plain_file(path: DataPath, progress: Callable[[float], None] | None = None) -> DataPath:
    """Return a decompressed copy of a file, or the file itself if it is not compressed. The copy is
    made once per size and modification time. Raise a ``DataError`` if the file is damaged, or the
    disk is full, and a ``ConfigError`` if the package ``zstandard`` is missing.

    Args:
        path: file; compression is detected by its first bytes.
        progress: called with the decompressed fraction.
    """
    with open_data(path) as file:
        head = file.read(4)
    if not head.startswith((_GZIP, _ZSTD)):
        return path
    size = size_of(path)
    key = hashlib.sha256(json.dumps([str(path), size, version_of(path)]).encode()).hexdigest()
    target = cache_folder("decompressed") / f"{key[:32]}{data_suffix(path)}"
    if target.is_file():
        return target
    try:
        with open_data(path, SCAN_BLOCK) as source, written_file(target) as file:
            blocks = _gzip_blocks if head.startswith(_GZIP) else _zstd_blocks
            for block in blocks(source, path):
                file.write(block)
                if progress is not None:
                    progress(source.tell() / max(size, 1))
    except OSError as error:
        if not isinstance(error, gzip.BadGzipFile):
            free = shutil.disk_usage(target.parent).free
            raise DataError(
                f"{path} cannot be decompressed into {target.parent}, which has {free:,} bytes "
                f"free ({error}). Set RAYMM_CACHE to a folder with more space, or decompress the "
                "file"
            ) from None
        raise _broken(path, error) from None
    except (EOFError, zlib.error) as error:
        raise _broken(path, error) from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":  # the package is optional
            raise
        raise _broken(path, error) from None
    return target


def _broken(path: DataPath, error: Exception) -> DataError:
    return DataError(f"{path} is not a complete compressed file ({error}); is it cut off?")


def _gzip_blocks(source: BinaryIO, path: DataPath) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=source) as stream:
        yield from iter(lambda: stream.read(SCAN_BLOCK), b"")


def _zstd_blocks(source: BinaryIO, path: DataPath) -> Iterator[bytes]:
    """Yield the decompressed content of all frames; raise an ``EOFError`` if the last frame is
    incomplete."""
    zstandard = require("zstandard", "zstd", f"reading {path}")
    frame, complete = zstandard.ZstdDecompressor().decompressobj(), True
    while data := source.read(_ZSTD_BLOCK):
        while data:
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(data)
            complete, data = frame.eof, frame.unused_data
    if not complete:
        raise EOFError("its last frame is incomplete")


def find_files(path: DataPath, suffixes: Sequence[str]) -> Sequence[DataPath]:
    """Return files with certain suffixes, sorted by name: the path itself, all files below a
    folder, or the matches of a glob. Hidden files and folders within a folder are ignored, as is
    the suffix of a compression. Raise a ``DataError`` if there are no such files."""
    if path.is_file():  # includes names that look like a pattern
        return [path]
    files: Sequence[DataPath]
    if isinstance(path, RemotePath):
        if path.has_magic():
            files, path_kind = path.matches(), "pattern"
        else:
            below = path.files() if path.url.in_bucket else []
            files = [file for file in below if data_suffix(file) in suffixes]
            path_kind = "folder" if below else "data file"
    elif path.is_dir():
        files = [file for file in visible_files(path) if data_suffix(file) in suffixes]
        path_kind = "folder"
    else:
        matches = sorted(Path(file) for file in glob.glob(str(path), recursive=True))
        files = [file for file in matches if file.is_file()]
        path_kind = "pattern" if glob.has_magic(str(path)) else "data file"
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
