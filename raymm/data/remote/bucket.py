"""Data files in S3 and Google Cloud Storage, read through the client that checkpoints also use."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from threading import Lock
from typing import Any, NamedTuple

from raymm.actors.storage.bucket import connect, tried
from raymm.data.remote.store import OPEN_RETRY_FOR_S, READ_RETRY_FOR_S, FileVersion, Store, changed
from raymm.data.remote.urls import DataUrl
from raymm.errors import DataError

# Open files kept per process. Each is a size and a tag; no connection stays open.
MOST_OPEN = 256
# Seconds after which an open file is opened again to detect changes: S3 range reads do not report
# the version.
LOOK_AGAIN_S = 60.0
# Metadata fields that change with the contents of a file.
_TAGS = ("ETag", "generation", "etag")
_DENIED = (
    "ACCESS_DENIED", "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_ACCESS_KEY", "SIGNATURE",
)


class _Open(NamedTuple):
    file: Any  # pyarrow.NativeFile
    version: FileVersion
    since: float


class BucketStore(Store):
    """Files of one bucket (``s3://``, ``gs://``), read by ranges with pyarrow."""

    def __init__(self, scheme: str, bucket: str, query: str) -> None:
        self._scheme, self._bucket, self._query = scheme, bucket, query
        self._opened: OrderedDict[str, _Open] = OrderedDict()
        self._lock = Lock()

    def version(self, url: DataUrl, retry_for_s: float = OPEN_RETRY_FOR_S) -> FileVersion:
        with self._lock:
            self._opened.pop(url.key, None)
        try:
            return self._tried(url, lambda: self._open(url), retry_for_s).version
        except FileNotFoundError:
            from pyarrow.fs import FileType

            bucket = self._tried(
                url, lambda: self._client().get_file_info(self._bucket), retry_for_s
            )
            if bucket.type == FileType.NotFound:
                raise DataError(f"{url}: there is no bucket {self._bucket!r}") from None
            raise

    def read(self, url: DataUrl, start: int, size: int, version: FileVersion | None) -> bytes:
        def read() -> bytes:
            opened = self._open(url)
            if version is not None and opened.version != version:
                raise changed(url, version, opened.version)
            try:
                data = opened.file.read_at(size, start)
            except OSError:
                with self._lock:  # the file may be shorter now, so its version is read again
                    self._opened.pop(url.key, None)
                raise
            if len(data) < size:
                raise OSError(f"the server returned {len(data):,} of {size:,} bytes")
            return data

        return self._tried(url, read, READ_RETRY_FOR_S)

    def head(self, url: DataUrl, size: int) -> tuple[FileVersion, bytes]:
        version = self.version(url, READ_RETRY_FOR_S)
        size = min(size, version.size)
        return version, self.read(url, 0, size, version) if size else b""

    def keys(self, folder: DataUrl) -> list[str]:
        from pyarrow.fs import FileSelector

        root = f"{self._bucket}/{folder.key}".rstrip("/")
        selector = FileSelector(root, allow_not_found=True, recursive=True)
        listed = self._tried(
            folder, lambda: self._client().get_file_info(selector), OPEN_RETRY_FOR_S
        )
        return sorted(
            entry.path.removeprefix(f"{self._bucket}/") for entry in listed if entry.is_file
        )

    def _client(self) -> Any:
        return connect(self._scheme, self._bucket, self._query)

    def _open(self, url: DataUrl) -> _Open:
        now = time.monotonic()
        with self._lock:
            opened = self._opened.get(url.key)
            if opened is not None and now - opened.since < LOOK_AGAIN_S:
                self._opened.move_to_end(url.key)
                return opened
        file = self._client().open_input_file(f"{self._bucket}/{url.key}")
        facts = {
            str(name): value.decode(errors="replace") if isinstance(value, bytes) else str(value)
            for name, value in (file.metadata() or {}).items()
        }
        tag = next((facts[name] for name in _TAGS if facts.get(name)), "")
        opened = _Open(file, FileVersion(file.size(), tag or facts.get("Last-Modified", "")), now)
        with self._lock:
            self._opened[url.key] = opened
            while len(self._opened) > MOST_OPEN:
                self._opened.popitem(last=False)
        return opened

    def _tried(self, url: DataUrl, operation: Any, retry_for_s: float) -> Any:
        try:
            return tried(operation, retry_for_s)
        except FileNotFoundError:
            raise FileNotFoundError(2, "there is no such file", str(url)) from None
        except OSError as error:
            raise DataError(f"{url}: {_reason(error, self._bucket, retry_for_s)}") from None


def _reason(error: OSError, bucket: str, retry_for_s: float) -> str:
    text = str(error)
    if any(word in text for word in _DENIED):
        return (
            f"access is denied ({text}). Set credentials with read access in the environment of "
            "all nodes (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role), or add "
            "?anonymous=true for a public bucket"
        )
    if "NO_SUCH_BUCKET" in text or re.search(r"[Bb]ucket '[^']*' not found", text):
        return f"there is no bucket {bucket!r} ({text})"
    return f"{text} (tried for {retry_for_s:g} s)"
