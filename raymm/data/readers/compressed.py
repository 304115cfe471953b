"""Compressed data files, decompressed once into a cache so that rows can be read by offset."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from raymm.data.readers.cache import cache_folder, written_file
from raymm.data.remote.path import SCAN_BLOCK, DataPath, open_data, size_of, version_of
from raymm.errors import DataError
from raymm.packages import require

COMPRESSED = (".gz", ".zst")
# Compressed bytes per call of the decompressor; a few of them may expand to 128 KiB.
_ZSTD_BLOCK = 2**14
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


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
