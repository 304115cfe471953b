"""Reading small files of folders that others can write to."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

# Bytes that a file of JSON may have: a manifest of a million tensors has half as many.
MOST_BYTES = 256 * 2**20


def read_plain(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file; links are followed.

    Args:
        path: the file.
        most: bytes that the file may have.

    Raises:
        OSError: the file is not regular, is larger, or cannot be read.
    """
    with open_plain(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes, which is the limit")
    return data


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading. Opening never waits, as it would for a pipe's other end,
    and has no effect on a device.

    Raises:
        OSError: the file is not regular, or cannot be opened.
    """
    _check_regular(os.stat(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _check_regular(os.fstat(descriptor))  # another file may be there by now
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
    """True for the name of a file in a folder: a text without the name of another folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and "\0" not in name and (
        Path(name).name == name
    )
