"""Where the files lie that rows may name.

A row is data, often somebody else's: `../../.ssh/id_rsa` in it, or a link of that name in an
archive, must not be read. What a source's own folder has may be, and what a configuration allows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from raymm.data.samples.errors import RowError

# Folders whose links are looked up once: a source's files are in few.
_FOLDERS_KEPT = 10_000


class OutsideError(RowError):
    """A row that names a file outside of the folders that it may."""


@dataclass(frozen=True)
class MediaFolders:
    """The folders of a source.

    Attributes:
        own: the source's, which relative paths are relative to.
        others: those that ``data.media_folders`` allows besides.
    """

    own: Path
    others: Sequence[str] = ()

    def path(self, name: str, column: str) -> str:
        """Where a file is that a row names. Links of folders are followed; whether the file itself
        is a link, :meth:`check` says: it takes a look at every file.

        Args:
            name: relative to the source's folder, or absolute.
            column: for errors.

        Raises:
            OutsideError: it is in none of the folders.
        """
        path = os.path.normpath(self.own / name)
        folder, file = os.path.split(path)
        self._within(path, os.path.join(_real(folder), file), column)
        return path

    def check(self, path: str, column: str) -> None:
        """
        Raises:
            OutsideError: a file that is a link to one in none of the folders.
        """
        if os.path.islink(path):
            self._within(path, os.path.realpath(path), column)

    def _within(self, path: str, real: str, column: str) -> None:
        for folder in (str(self.own), *self.others):
            root = _real(folder)
            if real.startswith(root if root.endswith(os.sep) else root + os.sep):
                return
        where = path if real == path else f"{path}, which is {real}"
        raise OutsideError(
            f"column {column!r} names {where}, outside of the source's folder {self.own}. If its "
            f"rows may, say so: data.media_folders: [{os.path.dirname(real)}]",
            column,
        )


@lru_cache(maxsize=_FOLDERS_KEPT)
def _real(folder: str) -> str:
    return os.path.realpath(folder)
