"""Id of a run in a logger, which is kept when the run resumes."""

from __future__ import annotations

from collections.abc import Callable

from raymm.callbacks.callback import RunInfo
from raymm.files.run_files import write_whole


def logger_run_id(run: RunInfo, logger: str, make: Callable[[], str]) -> str:
    """Return the id of a run in a logger, stored in a file in the folder of the run.

    A resumed run keeps its id; a new run in the folder gets a new one from ``make``. Raise a
    ``RunFileError`` if the file cannot be written.
    """
    file = run.folder / f"{logger}_run_id"
    if run.first_step and file.is_file():
        return file.read_text(encoding="utf-8").strip()
    identity = make()
    write_whole(file, identity + "\n")
    return identity
