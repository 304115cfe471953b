"""Reading of small files in folders that other users can write to."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

# Largest size in bytes of a JSON file: a manifest of a million tensors has half of it.
MOST_BYTES = 256 * 2**20


def read_plain(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file; links are followed. Raise an ``OSError`` if the file is
    not regular, is larger, or cannot be read."""
    with open_plain(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes, which is the limit")
    return data


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading. Opening never blocks, and has no effect on a device. Raise
    an ``OSError`` if the file is not regular, or cannot be opened."""
    _check_regular(os.stat(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _check_regular(os.fstat(descriptor))  # the file may have been replaced meanwhile
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(state: os.stat_result) -> None:
    if stat.S_ISDIR(state.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def is_plain_name(name: object) -> bool:
    """Return True for a string that is the name of a file in a folder, without path separators."""
    return isinstance(name, str) and name not in ("", ".", "..") and "\0" not in name and (
        Path(name).name == name
    )
