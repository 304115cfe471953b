"""Where commands write: looked at before any work is done, and named if it fails all the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from raymm.files.config_error import ConfigError


@dataclass(frozen=True)
class OutputFolder:
    """A folder that will be written.

    Attributes:
        field: what named it: a field of the configuration or an option.
        name: as it was given.
    """

    field: str
    name: str

    @property
    def path(self) -> Path:
        return Path(self.name)

    def check(self) -> None:
        """Look whether it can be written, or made; makes nothing.

        Raises:
            ConfigError: naming the field, the folder and what is in the way.
        """
        if not self.name.strip() or "\0" in self.name:
            raise self._refused("it is empty, or has a null character")
        path = self.path.absolute()
        try:
            while not path.exists() and path != path.parent:
                path = path.parent
            is_folder, writable = path.is_dir(), os.access(path, os.W_OK | os.X_OK)
        except (OSError, ValueError) as error:  # a name too long, a null character
            raise self._refused(_reason(error)) from None
        if not is_folder:
            raise self._refused(f"{path} is not a folder")
        if not writable:
            raise self._refused(f"{path} cannot be written")

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """Make the folder, and name it where writing fails in the block.

        Raises:
            ConfigError: naming the field, the folder and what is in the way.
        """
        self.check()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            yield self.path
        except OSError as error:
            raise self._refused(_reason(error)) from None

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self.field} is {self.name!r}; expected a folder that can be written: {reason}"
        )


def _reason(error: OSError | ValueError) -> str:
    where = getattr(error, "filename", None)
    reason = getattr(error, "strerror", None) or str(error)
    return f"{where}: {reason}" if where else reason
