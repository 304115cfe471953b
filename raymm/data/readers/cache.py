"""Cache folders for files that can be recreated: indexes, scans, decompressed data."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


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
