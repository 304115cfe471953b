"""Restriction of the files that rows may name.

Rows often come from third parties. A row with `../../.ssh/id_rsa`, a link to such a file in an
archive, or a URL of a server that only this machine can reach must not be read. Accepted are files
in the folder of the source, and in folders that the configuration names.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from raymm.data.remote.path import DataPath, RemotePath
from raymm.data.remote.urls import DataUrl, is_url, parse
from raymm.errors import SampleError

# Number of folders whose resolved path is cached; the files of a source are in few folders.
_FOLDERS_KEPT = 10_000


def _outside(reason: str, column: str) -> SampleError:
    error = SampleError(reason, column)
    error.outside = True
    return error


@dataclass(frozen=True)
class MediaFolders:
    """Folders in which the rows of a source may name files: the folder ``own`` of the source, from
    which relative paths start, and ``others``, the local folders and URLs of
    ``data.media_folders``."""

    own: DataPath
    others: Sequence[str] = ()

    def path(self, name: str, column: str) -> str:
        """Return the path or URL of a file that a row names (a relative or absolute path, or a
        URL), after resolving links of folders. Links of files are checked by :meth:`check`, which
        costs a system call. Raise a ``SampleError`` if the file is in none of the folders."""
        if is_url(name):
            return self._allowed_url(name, column)
        if isinstance(self.own, RemotePath) and not os.path.isabs(name):
            base = self.own.url
            url = base.with_key(posixpath.normpath(posixpath.join("/", base.key, name)).lstrip("/"))
            if not url.within(base):
                raise self._outside(str(url), str(self.own), column)
            return str(url)
        path = os.path.normpath(os.path.join(str(self.own), name))
        folder, file = os.path.split(path)
        self._within(path, os.path.join(_real(folder), file), column)
        return path

    def check(self, path: str, column: str) -> None:
        """Raise a ``SampleError`` for a link to a file that is in none of the folders."""
        if not is_url(path) and os.path.islink(path):
            self._within(path, os.path.realpath(path), column)

    def _within(self, path: str, real: str, column: str) -> None:
        for folder in (str(self.own), *self.others):
            if is_url(folder):
                continue
            root = _real(folder)
            if real.startswith(root if root.endswith(os.sep) else root + os.sep):
                return
        where = path if real == path else f"{path}, which is {real}"
        raise self._outside(where, os.path.dirname(real), column)

    def _allowed_url(self, name: str, column: str) -> str:
        """Return a URL that a row names, with the connection options of the allowed URL above it.
        """
        try:
            url = parse(name)
        except ValueError as error:
            reason = f"column {column!r} has the URL {name[:80]!r}: {error}"
            raise _outside(reason, column) from None
        folders = [self.own.url] if isinstance(self.own, RemotePath) else []
        for folder in (*folders, *map(_url, filter(is_url, self.others))):
            if url.within(folder) and url.query in ("", folder.query):
                return str(folder.with_key(url.key))
        raise self._outside(name[:80], posixpath.dirname(name[:80]), column)

    def _outside(self, where: str, folder: str, column: str) -> SampleError:
        return _outside(
            f"column {column!r} names {where}, outside of the source's folder {self.own}. To allow "
            f"this, set data.media_folders: [{folder}]",
            column,
        )


@lru_cache
def _url(text: str) -> DataUrl:
    return parse(text)


@lru_cache(maxsize=_FOLDERS_KEPT)
def _real(folder: str) -> str:
    return os.path.realpath(folder)
