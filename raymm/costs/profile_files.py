"""Files of measured layer costs."""

from __future__ import annotations

import os
from pathlib import Path

from raymm.errors import PlanError
from raymm.files.run_files import write_whole
from raymm.scheduler.costs.profile_table import ProfileTable
from raymm.scheduler.graph.strict_json import read_file


def save_table(table: ProfileTable, path: str | os.PathLike[str]) -> Path:
    """Write a table as JSON atomically. Raises RunFileError if the file cannot be written."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, table.to_json())
    return target


def load_table(path: str | os.PathLike[str]) -> ProfileTable:
    """Read a file of :func:`save_table`. Raises PlanError if the file does not exist or is
    invalid."""
    file = Path(path)
    if not file.is_file():
        raise PlanError(f"profile is {str(path)!r}; there is no such file")
    try:
        return ProfileTable.from_json(read_file(file))
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
