"""Folders in which rows may name files.

Rows are often data of other people. A row with `../../.ssh/id_rsa`, a link of that name in an
archive, or a URL of a server that only this machine reaches must not be read. Allowed are files of
the source's folder, and of the folders that the configuration names.
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

# Folders whose links are looked up once: a source's files are in few.
_FOLDERS_KEPT = 10_000


def _outside(reason: str, column: str) -> SampleError:
    error = SampleError(reason, column)
    error.outside = True
    return error


@dataclass(frozen=True)
class MediaFolders:
    """The folders of a source.

    Attributes:
        own: the source's, which relative paths are relative to.
        others: further folders of ``data.media_folders``: folders of this machine, or URLs.
    """

    own: DataPath
    others: Sequence[str] = ()

    def path(self, name: str, column: str) -> str:
        """Return the path of a file that a row names. Links of folders are followed;
        :meth:`check` looks for links of files, which takes a system call per file.

        Args:
            name: relative to the source's folder, or absolute, or a URL.
            column: for errors.

        Returns:
            A path without links of folders, or a URL.

        Raises:
            SampleError: it is in none of the folders.
        """
        if is_url(name):
            return self._allowed_url(name, column)
        if isinstance(self.own, RemotePath) and not os.path.isabs(name):
            own = self.own.url
            url = own.with_key(posixpath.normpath(posixpath.join("/", own.key, name)).lstrip("/"))
            if not url.within(own):
                raise self._outside(str(url), str(self.own), column)
            return str(url)
        path = os.path.normpath(os.path.join(str(self.own), name))
        folder, file = os.path.split(path)
        self._within(path, os.path.join(_real(folder), file), column)
        return path

    def check(self, path: str, column: str) -> None:
        """
        Raises:
            SampleError: a file that is a link to one in none of the folders.
        """
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
        """The URL of a file that a row names by one: below the source's, or one that is allowed,
        whose connection's options it has."""
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
