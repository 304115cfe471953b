"""Where data files are: a path, or a remote one with the same methods."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from raymm.data.remote.file import RemoteFile, buffered
from raymm.data.remote.store import FileVersion
from raymm.data.remote.stores import store_of
from raymm.data.remote.urls import DataUrl, is_url, parse

# Bytes of a request where a file is read from one end to the other, and where it is read here and
# there.
SCAN_BLOCK = 4 * 2**20
ROW_BLOCK = 2**16
_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class RemotePath:
    """A file or folder of a bucket, or a file of a web server. What it has of ``pathlib.Path``'s
    names means the same.

    Attributes:
        url: its parts.
    """

    url: DataUrl

    def __str__(self) -> str:
        return str(self.url)

    @property
    def name(self) -> str:
        return posixpath.basename(self.url.key)

    @property
    def stem(self) -> str:
        return posixpath.splitext(self.name)[0]

    @property
    def suffix(self) -> str:
        return posixpath.splitext(self.name)[1]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.with_key(posixpath.dirname(self.url.key)))

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.url.with_key(posixpath.join(self.url.key, name)))

    def absolute(self) -> RemotePath:
        return self

    @cached_property
    def version(self) -> FileVersion:
        """Size and tag when it was first asked for: what is read later must be of the same. A
        pickled path keeps them.

        Raises:
            FileNotFoundError: there is no such file.
            DataError: the server does not say.
        """
        return store_of(self.url).version(self.url)

    def is_file(self) -> bool:
        """Whether there is such a file.

        Raises:
            DataError: the server does not say.
        """
        try:
            return self.version is not None
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Whether there is a folder that can be listed, with a file in it.

        Raises:
            DataError: the bucket does not say.
        """
        return self.url.in_bucket and bool(self.files())

    def files(self) -> list[RemotePath]:
        """All files below a folder, by name."""
        return [RemotePath(self.url.with_key(key)) for key in store_of(self.url).keys(self.url)]

    def matches(self) -> list[RemotePath]:
        """Files that a pattern means (``*``, ``?``, ``[]``; ``**`` for folders), by name."""
        if not self.has_magic():
            return [self] if self.is_file() else []
        parts = self.url.key.split("/")
        first = next(n for n, part in enumerate(parts) if _MAGIC.search(part))
        folder = RemotePath(self.url.with_key("/".join(parts[:first])))
        pattern = _expression(parts)
        return [file for file in folder.files() if pattern.fullmatch(file.url.key)]

    def has_magic(self) -> bool:
        """Whether it is a pattern."""
        return bool(_MAGIC.search(self.url.key))

    def open(self, block: int = ROW_BLOCK) -> BinaryIO:
        """A binary file of its bytes.

        Args:
            block: bytes that are read at once.
        """
        return buffered(RemoteFile(self.url, self.version), block)


DataPath = Path | RemotePath


def _expression(parts: list[str]) -> re.Pattern[str]:
    """What keys must be like that a pattern means, of its parts between slashes."""
    text = ""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            text += ".+" if last else "(?:[^/]+/)*"
            continue
        for token in re.findall(r"\[[^\]]+\]|.", part):
            wild = {"*": "[^/]*", "?": "[^/]"}.get(token)
            is_set = len(token) > 1
            text += wild or (token.replace("[!", "[^") if is_set else re.escape(token))
        text += "" if last else "/"
    return re.compile(text)


def located(path: str | Path | RemotePath) -> DataPath:
    """Where a path or URL leads, links followed.

    Raises:
        ValueError: a URL that is not accepted.
    """
    if isinstance(path, RemotePath):
        return path
    text = str(path)
    return RemotePath(parse(text)) if is_url(text) else Path(path).resolve()


def open_data(path: DataPath, block: int = ROW_BLOCK) -> BinaryIO:
    """A data file, to be read.

    Args:
        path: where it is.
        block: bytes that are read at once where it is remote.

    Raises:
        OSError: it is not there, or cannot be read.
        DataError: the server does not give it.
    """
    return path.open("rb") if isinstance(path, Path) else path.open(block)


def read_range(path: DataPath, start: int, size: int) -> bytes:
    """Bytes of a data file; fewer if it ends before.

    Args:
        path: where it is.
        start, size: of the range, in bytes.

    Raises:
        OSError, DataError: as of :func:`open_data`.
    """
    if isinstance(path, RemotePath):
        return store_of(path.url).read(path.url, start, size, path.version)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(size)


def size_of(path: DataPath) -> int:
    """Bytes of a data file.

    Args:
        path: where it is.

    Raises:
        OSError, DataError: as of :func:`open_data`.
    """
    return path.version.size if isinstance(path, RemotePath) else path.stat().st_size


def version_of(path: DataPath) -> Any:
    """What changes when a data file is written again; plain JSON.

    Args:
        path: where it is.
    """
    return path.version.tag if isinstance(path, RemotePath) else path.stat().st_mtime_ns
