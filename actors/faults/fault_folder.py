"""Folder in which tracebacks and stacks of a fault are saved."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_run_folder: ContextVar[Path | None] = ContextVar("run_folder", default=None)


@contextmanager
def faults_kept_in(run_folder: Path) -> Iterator[None]:
    """Save faults that occur in the block in ``run_folder/faults``, instead of Ray's log folder."""
    token = _run_folder.set(run_folder)
    try:
        yield
    finally:
        _run_folder.reset(token)


def keep(texts: Mapping[str, str]) -> str:
    """Write files, given as name -> text, into a new folder. Return the folder, or the reason why
    it cannot be written, because the caller reports a more important error."""
    folder = _base() / "faults" / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, errors="backslashreplace")
    except OSError as error:
        return f"not saved: {error}"
    return str(folder)


def _base() -> Path:
    if (folder := _run_folder.get()) is not None:
        return folder
    import ray._private.worker

    node = ray._private.worker._global_node
    return Path(tempfile.gettempdir() if node is None else node.get_logs_dir_path())
