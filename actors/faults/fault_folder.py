"""Where what is known of a fault is kept: tracebacks, stacks."""

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
    """Faults within the block are kept in ``run_folder/faults``. Without, in the folder of Ray's
    logs."""
    token = _run_folder.set(run_folder)
    try:
        yield
    finally:
        _run_folder.reset(token)


def keep(texts: Mapping[str, str]) -> str:
    """Write files into a new folder.

    Args:
        texts: by file name.

    Returns:
        The folder; or why there is none, as an error is on its way that matters more.
    """
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
