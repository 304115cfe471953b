"""Files of a run: written whole or not at all, and errors that say which file and why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from raymm.actors.storage.folder import PARTIAL, replace_file
from raymm.errors import FailureKind, RunFileError


def is_shortage(error: OSError) -> bool:
    """Return True if what could not be written may be written later: a full disk, say."""
    from raymm.actors.faults.failure_kind import failure_kind  # imports torch

    return failure_kind(error) is FailureKind.RESOURCE


@contextmanager
def writing(path: Any) -> Iterator[None]:
    """Name the file in what goes wrong while it is written.

    Raises:
        RunFileError: instead of any other ``OSError``.
    """
    try:
        yield
    except RunFileError:
        raise
    except OSError as error:
        raise RunFileError(f"cannot write {path}: {error.strerror or error}") from error


def write_whole(path: Path, text: str) -> None:
    """Replace a file by another one, atomically; on disk when this returns.

    Raises:
        RunFileError: it cannot be written; what was there is still there.
    """
    with writing(path):
        replace_file(path, text.encode())


def append(path: Path, text: str, durable: bool = False) -> None:
    """Add to the end of a file, all of the text or nothing.

    Args:
        path: of the file; it is made.
        text: in UTF-8.
        durable: wait until it is on disk.

    Raises:
        RunFileError: it cannot be written.
    """
    with writing(path), open(path, "ab", buffering=0) as file:
        size, rest = os.fstat(file.fileno()).st_size, memoryview(text.encode())
        try:
            while rest:
                rest = rest[file.write(rest) :]
            if durable:
                os.fsync(file.fileno())
        except OSError:  # a disk that is full may have taken the beginning of the text
            with suppress(OSError):
                os.ftruncate(file.fileno(), size)
            raise


def remove_partial(folder: Path) -> list[Path]:
    """Remove files that were never whole; returns them. For the folder's only writer.

    Raises:
        RunFileError: one cannot be removed.
    """
    # Folders are an export's, which may be at work.
    partial = sorted(file for file in folder.glob(f".*{PARTIAL}") if not file.is_dir())
    for file in partial:
        with writing(file):
            file.unlink(missing_ok=True)
    return partial
