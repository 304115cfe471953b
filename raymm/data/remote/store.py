"""What buckets and web servers are asked for: a file's size and version, and ranges of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from raymm.data.remote.urls import DataUrl
from raymm.errors import DataError

# How long a request that fails is tried again: while a run is started, where a person waits, and
# while it goes on. Below ``data.worker_timeout``, after which a worker is taken for stuck.
OPEN_RETRY_FOR_S = 10.0
READ_RETRY_FOR_S = 120.0


class FileVersion(NamedTuple):
    """What tells a file from another one of its name.

    Attributes:
        size: in bytes.
        tag: the server's (ETag, generation); where it has none, the time of its last change; "" if
            that is not told either, and size alone counts.
    """

    size: int
    tag: str


class Store(ABC):
    """A bucket, or a web server. Methods may be called by several threads.

    All of them raise ``FileNotFoundError`` for a file that is not there, and :class:`DataError`
    for a server that refuses, or does not answer for as long as it is tried again.
    """

    @abstractmethod
    def version(self, url: DataUrl, retry_for_s: float = OPEN_RETRY_FOR_S) -> FileVersion:
        """Size and tag of a file."""

    @abstractmethod
    def read(self, url: DataUrl, start: int, size: int, version: FileVersion | None) -> bytes:
        """So many bytes of a file from a place on, all of which it has.

        Args:
            url: of the file.
            start, size: the range, above 0 bytes.
            version: which it was when its size was asked for; another one is a
                :class:`DataError`.
        """

    @abstractmethod
    def head(self, url: DataUrl, size: int) -> tuple[FileVersion, bytes]:
        """The version of a file and its first bytes, at most ``size``."""

    @abstractmethod
    def keys(self, folder: DataUrl) -> list[str]:
        """Keys of all files below a folder, sorted."""


def changed(url: DataUrl, before: FileVersion, now: FileVersion) -> DataError:
    """What to say of a file that is another one now.

    Args:
        url: of the file.
        before, now: its versions.
    """
    return DataError(
        f"{url} was changed while the run reads it: it had {before.size:,} bytes and tag "
        f"{before.tag or 'none'}, now {now.size:,} and {now.tag or 'none'}. Start the run again"
    )
