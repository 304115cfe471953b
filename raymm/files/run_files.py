"""Files of a run: atomic writes, and errors that name file and cause."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from raymm.actors.storage.folder import PARTIAL, replace_file
from raymm.errors import FailureKind, RunFileError


def is_shortage(error: OSError) -> bool:
    """Return True if the write may succeed later, for example after a full disk is freed."""
    from raymm.actors.faults.failure_kind import failure_kind  # imports torch

    return failure_kind(error) is FailureKind.RESOURCE


@contextmanager
def writing(path: Any) -> Iterator[None]:
    """Name the file in errors from the block. Raise a ``RunFileError`` instead of any other
    ``OSError``."""
    try:
        yield
    except RunFileError:
        raise
    except OSError as error:
        raise RunFileError(f"cannot write {path}: {error.strerror or error}") from error


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically. The text is on disk when this returns. Raise a ``RunFileError`` if
    the file cannot be written and is unchanged."""
    with writing(path):
        replace_file(path, text.encode())


def append(path: Path, text: str, durable: bool = False) -> None:
    """Append a text to a file, completely or not at all. Raise a ``RunFileError`` if the file
    cannot be written.

    Args:
        durable: wait until the text is on disk.
    """
    with writing(path), open(path, "ab", buffering=0) as file:
        size, remaining = os.fstat(file.fileno()).st_size, memoryview(text.encode())
        try:
            while remaining:
                remaining = remaining[file.write(remaining) :]
            if durable:
                os.fsync(file.fileno())
        except OSError:  # a full disk may have taken the beginning of the text
            with suppress(OSError):
                os.ftruncate(file.fileno(), size)
            raise


def remove_partial(folder: Path) -> list[Path]:
    """Remove incomplete files; return them. Only the folder's single writer may call this. Raise a
    ``RunFileError`` if a file cannot be removed."""
    # Folders belong to exports, which may be running.
    partial = sorted(file for file in folder.glob(f".*{PARTIAL}") if not file.is_dir())
    for file in partial:
        with writing(file):
            file.unlink(missing_ok=True)
    return partial
