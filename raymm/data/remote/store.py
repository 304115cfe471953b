"""Interface of remote stores: the size and version of a file, and byte ranges of its contents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from raymm.data.remote.urls import DataUrl
from raymm.errors import DataError

# Seconds for which a failed request is retried: at startup, while a person waits, and during
# training. Less than ``data.worker_timeout``, after which a worker counts as stuck.
OPEN_RETRY_FOR_S = 10.0
READ_RETRY_FOR_S = 120.0


class FileVersion(NamedTuple):
    """Version of a file, which changes when the file is replaced.

    Attributes:
        tag: ETag or generation from the server; else the time of the last change; ``""`` if the
            server reports neither, so that only sizes are compared.
    """

    size: int
    tag: str


class Store(ABC):
    """Bucket or web server. Methods are thread-safe. All methods raise ``FileNotFoundError`` for a
    missing file, and :class:`DataError` if the server denies access or does not answer within the
    retry time."""

    @abstractmethod
    def version(self, url: DataUrl, retry_for_s: float = OPEN_RETRY_FOR_S) -> FileVersion:
        """Return the size and tag of a file; retry failed requests for ``retry_for_s`` seconds."""

    @abstractmethod
    def read(self, url: DataUrl, start: int, size: int, version: FileVersion | None) -> bytes:
        """Read ``size`` > 0 bytes of a file from ``start`` on; the file must have all of them.
        Raise a :class:`DataError` if the file has another version than ``version``; None accepts
        any."""

    @abstractmethod
    def head(self, url: DataUrl, size: int) -> tuple[FileVersion, bytes]:
        """Return the version of a file and its first bytes, at most ``size``."""

    @abstractmethod
    def keys(self, folder: DataUrl) -> list[str]:
        """Return the keys of all files below a folder, sorted."""


def changed(url: DataUrl, before: FileVersion, now: FileVersion) -> DataError:
    """Return the error for a file that changed while the run was reading it."""
    return DataError(
        f"{url} changed while the run was reading it: it had {before.size:,} bytes and tag "
        f"{before.tag or 'none'}, and now has {now.size:,} bytes and tag {now.tag or 'none'}. "
        "Start the run again"
    )
