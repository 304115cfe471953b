"""What adapters of loggers need: their package, and a run of the same identity when it goes on."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from raymm.callbacks.callback import RunInfo
from raymm.files.config_error import ConfigError
from raymm.files.run_files import write_whole


def imported(module: str, extra: str, callback: str) -> Any:
    """A module of a package that raymm does not bring.

    Args:
        module: its name.
        extra: of raymm's extras, the one that has it.
        callback: who needs it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{callback} needs {module}, which cannot be imported ({error}); "
            f"`pip install 'raymm[{extra}]'` brings it"
        ) from None


def logger_run_id(run: RunInfo, logger: str, make: Callable[[], str]) -> str:
    """The identity that a run has in a logger: kept in its folder, so that it is the same when the
    run goes on, and another one when the folder begins anew.

    Args:
        run: the run.
        logger: whose identity it is.
        make: gives a new one.

    Raises:
        RunFileError: it cannot be written.
    """
    file = run.folder / f"{logger}_run_id"
    if run.first_step and file.is_file():
        return file.read_text(encoding="utf-8").strip()
    identity = make()
    write_whole(file, identity + "\n")
    return identity
