"""Locations of data files: local paths, or remote paths with the same methods."""

from __future__ import annotations

import io
import posixpath
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

from raymm.data.remote.store import FileVersion, store_of
from raymm.data.remote.urls import DataUrl, is_url, parse
from raymm.errors import DataError

# Bytes per request for sequential reads and for random access.
SCAN_BLOCK = 4 * 2**20
ROW_BLOCK = 2**16
_MAGIC = re.compile(r"[*?\[]")


class RemoteFile(io.RawIOBase):
    """Raw binary file in which every read is one request; wrap it in a buffer. Nothing is read
    ahead.

    Some libraries swallow read errors and report a corrupt file, so :meth:`close` raises the last
    read error again. A read raises a ``DataError`` if the file has another version than
    ``version``. With ``start`` and ``size``, the file is a byte range; ``head`` holds first bytes
    that were already read.
    """

    def __init__(
        self, url: DataUrl, version: FileVersion, start: int = 0, size: int | None = None,
        head: bytes = b"",
    ) -> None:
        self._url, self._version, self._start, self._head = url, version, start, head
        self._size = version.size - start if size is None else size
        self._at = 0
        self._failure: DataError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._range(len(view))
        view[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return self._range(max(self._size - self._at, 0))

    def _range(self, size: int) -> bytes:
        size = min(size, self._size - self._at)
        if size <= 0:
            return b""
        data = self._head[self._at : self._at + size]
        if len(data) < size:
            start = self._start + self._at + len(data)
            try:
                remainder = store_of(self._url).read(
                    self._url, start, size - len(data), self._version
                )
            except FileNotFoundError:
                self._failure = DataError(f"{self._url} was removed while the run was reading it")
                raise self._failure from None
            except DataError as error:
                self._failure = error
                raise
            data += remainder
        self._at += size
        return data

    def close(self) -> None:
        failure, self._failure = self._failure, None
        super().close()
        if failure is not None:
            raise failure


def buffered(file: RemoteFile, block: int) -> BinaryIO:
    """Return a reader with a buffer of ``block`` bytes, which is the size of a request; 0 for no
    buffer."""
    if not block:
        return cast(BinaryIO, file)
    return io.BufferedReader(file, block)


@dataclass(frozen=True)
class RemotePath:
    """File or folder in a bucket, or file on a web server. Attributes and methods that
    ``pathlib.Path`` also has mean the same."""

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
        """Size and tag at the first access; pickling keeps them. Later reads fail if the file has
        changed. Raise a ``FileNotFoundError`` if the file does not exist, and a ``DataError`` if
        the server does not answer, or denies access."""
        return store_of(self.url).version(self.url)

    def is_file(self) -> bool:
        """Return True if the file exists; raise a ``DataError`` if the server does not answer."""
        try:
            return self.version is not None
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Return True for a folder in a bucket that contains at least one file; raise a
        ``DataError`` if the bucket does not answer."""
        return self.url.in_bucket and bool(self.files())

    def files(self) -> list[RemotePath]:
        """Return all files below the folder, recursively, sorted by name."""
        return [RemotePath(self.url.with_key(key)) for key in store_of(self.url).keys(self.url)]

    def matches(self) -> list[RemotePath]:
        """Return the files that match the pattern (``*``, ``?``, ``[]``; ``**`` for folders),
        sorted by name."""
        if not self.has_magic():
            return [self] if self.is_file() else []
        parts = self.url.key.split("/")
        first = next(n for n, part in enumerate(parts) if _MAGIC.search(part))
        folder = RemotePath(self.url.with_key("/".join(parts[:first])))
        pattern = _expression(parts)
        return [file for file in folder.files() if pattern.fullmatch(file.url.key)]

    def has_magic(self) -> bool:
        return bool(_MAGIC.search(self.url.key))

    def open(self, block: int = ROW_BLOCK) -> BinaryIO:
        """Open the file for reading bytes; ``block`` is the number of bytes per request."""
        return buffered(RemoteFile(self.url, self.version), block)


DataPath = Path | RemotePath


def _expression(parts: list[str]) -> re.Pattern[str]:
    """Return the regular expression for a glob pattern, given its parts between slashes."""
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
    """Return the location of a path or URL, with symbolic links resolved. Raise a ``ValueError`` if
    the URL is not accepted."""
    if isinstance(path, RemotePath):
        return path
    text = str(path)
    return RemotePath(parse(text)) if is_url(text) else Path(path).resolve()


def open_data(path: DataPath, block: int = ROW_BLOCK) -> BinaryIO:
    """Open a data file for reading. Raise an ``OSError`` if the file does not exist or cannot be
    read, and a ``DataError`` if the server does not answer, or denies access.

    Args:
        block: bytes per request of a remote file.
    """
    return path.open("rb") if isinstance(path, Path) else path.open(block)


def read_range(path: DataPath, start: int, size: int) -> bytes:
    """Read ``size`` bytes of a data file from ``start`` on; fewer at the end of a local file.
    Errors are those of :func:`open_data`."""
    if isinstance(path, RemotePath):
        return store_of(path.url).read(path.url, start, size, path.version)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(size)


def size_of(path: DataPath) -> int:
    """Return the size of a data file in bytes. Errors are those of :func:`open_data`."""
    return path.version.size if isinstance(path, RemotePath) else path.stat().st_size


def version_of(path: DataPath) -> Any:
    """Return a JSON value that changes when a data file is rewritten: the tag of a remote file, the
    modification time of a local one."""
    return path.version.tag if isinstance(path, RemotePath) else path.stat().st_mtime_ns
