"""Identity of a run in a logger, kept when the run resumes."""

from __future__ import annotations

from collections.abc import Callable

from raymm.callbacks.callback import RunInfo
from raymm.files.run_files import write_whole


def logger_run_id(run: RunInfo, logger: str, make: Callable[[], str]) -> str:
    """Return the identity of a run in a logger.

    A file in the run's folder keeps it, so that a run that resumes has the same identity and a new
    run in the folder has another one.

    Args:
        run: the run.
        logger: name of the logger.
        make: called for a new identity.

    Raises:
        RunFileError: the file cannot be written.
    """
    file = run.folder / f"{logger}_run_id"
    if run.first_step and file.is_file():
        return file.read_text(encoding="utf-8").strip()
    identity = make()
    write_whole(file, identity + "\n")
    return identity
