"""A remote file, or a byte range of one, as a binary file object."""

from __future__ import annotations

import io
from typing import BinaryIO, cast

from raymm.data.remote.store import FileVersion
from raymm.data.remote.stores import store_of
from raymm.data.remote.urls import DataUrl
from raymm.errors import DataError


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
