"""Remote stores: the size and version of a file, and byte ranges of its contents. Buckets are read
through the client that checkpoints also use, web servers by range requests."""

from __future__ import annotations

import functools
import os
import re
import ssl
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock, local
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urljoin

from raymm.actors.storage.bucket import CONNECT_TIMEOUT_S, SILENT_TIMEOUT_S, connect, tried
from raymm.data.remote.urls import DataUrl
from raymm.errors import DataError

# Seconds for which a failed request is retried: at startup, while a person waits, and during
# training. Less than ``data.worker_timeout``, after which a worker counts as stuck.
OPEN_RETRY_FOR_S = 10.0
READ_RETRY_FOR_S = 120.0
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
# Longest chain of redirects that is followed.
MOST_REDIRECTS = 5
# Temporary errors, for which a request is retried.
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_REDIRECTS = {301, 302, 303, 307, 308}
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")
_BLOCK = 2**18
# Environment variable of OpenSSL that names a file of trusted certificates.
CERTIFICATES = "SSL_CERT_FILE"
Value = TypeVar("Value")


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


class WebStore(Store):
    """Web server. Credentials come from ``~/.netrc``, proxies from the environment."""

    def __init__(self, scheme: str, host: str) -> None:
        self._scheme, self._host = scheme, host
        self._threads = local()

    def version(self, url: DataUrl, retry_for_s: float = OPEN_RETRY_FOR_S) -> FileVersion:
        return self._tried(url, lambda: self._get(url, 0, 1)[0], retry_for_s)

    def read(self, url: DataUrl, start: int, size: int, version: FileVersion | None) -> bytes:
        def read() -> bytes:
            current, data = self._get(url, start, size)
            if version is not None and current != version:
                raise changed(url, version, current)
            if len(data) < size:
                raise OSError(f"the server returned {len(data):,} of {size:,} bytes")
            return data

        return self._tried(url, read, READ_RETRY_FOR_S)

    def head(self, url: DataUrl, size: int) -> tuple[FileVersion, bytes]:
        return self._tried(url, lambda: self._get(url, 0, size), READ_RETRY_FOR_S)

    def keys(self, folder: DataUrl) -> list[str]:
        raise DataError(
            f"{folder}: folders and patterns are not supported on web servers; accepted: a list of "
            "files, or s3:// or gs://"
        )

    def _get(self, url: DataUrl, start: int, size: int) -> tuple[FileVersion, bytes]:
        """Return the version of a file and the bytes of a range; fewer if the file ends earlier.
        Raise an ``OSError`` for temporary errors."""
        with self._answer(url, start, size) as answer:
            status, headers = answer.status_code, answer.headers
            if status == 404 or status == 410:
                raise FileNotFoundError(2, "there is no such file", str(url))
            if status in _PASSING:
                raise OSError(f"the server answers {status} {answer.reason}")
            described = _RANGE.fullmatch(headers.get("Content-Range", ""))
            tag = headers.get("ETag") or headers.get("Last-Modified", "")
            if status == 416 and described:  # an empty file, or one that is shorter now
                return FileVersion(int(described[3]), tag), b""
            if status in (401, 403):
                raise DataError(
                    f"{url}: access is denied (status {status}); credentials are read from "
                    "~/.netrc of every node"
                )
            if status != 206 or not described or described[1] != str(start):
                raise DataError(
                    f"{url}: the server answered a range request with status {status} "
                    f"{answer.reason}; accepted: servers that support range requests (status 206)"
                )
            if headers.get("Content-Encoding", "identity") != "identity":
                raise DataError(
                    f"{url}: the server sent the file with Content-Encoding "
                    f"{headers['Content-Encoding']}; accepted: no encoding (identity)"
                )
            return FileVersion(int(described[3]), tag), _body(answer, size)

    def _answer(self, url: DataUrl, start: int, size: int) -> Any:
        """Return the response of the server after redirects, with its body unread."""
        location, named = str(url), f"{self._scheme}://{self._host}/"
        for _ in range(MOST_REDIRECTS + 1):
            # Without `auth`, requests adds credentials from the URL or from ~/.netrc, which ignores
            # ports.
            auth = None if location.startswith(named) else _no_credentials
            try:
                answer = self._session().get(
                    location, stream=True, allow_redirects=False, auth=auth,
                    timeout=(CONNECT_TIMEOUT_S, SILENT_TIMEOUT_S),
                    headers={"Range": f"bytes={start}-{start + size - 1}",
                             "Accept-Encoding": "identity"},
                )
            except OSError as error:
                if (untrusted := _certificate_error(error)) is None:
                    raise
                raise DataError(
                    f"{url}: the server's certificate is not trusted: {untrusted.verify_message}; "
                    f"for a private certificate authority, set {CERTIFICATES} to a file with its "
                    "certificates on every node"
                ) from None
            if answer.status_code not in _REDIRECTS:
                return answer
            target = urljoin(location, answer.headers.get("Location", ""))
            answer.close()
            if not target.startswith(("https://", named)):
                raise DataError(
                    f"{url}: the server redirects to {target[:80]!r}; accepted: https://"
                )
            location = target
        raise DataError(f"{url}: the server redirects more than {MOST_REDIRECTS} times")

    def _session(self) -> Any:
        if not hasattr(self._threads, "session"):
            import requests

            self._threads.session = requests.Session()
        # requests itself only reads REQUESTS_CA_BUNDLE, which takes precedence.
        self._threads.session.verify = os.environ.get(CERTIFICATES) or True
        return self._threads.session

    def _tried(self, url: DataUrl, operation: Callable[[], Value], retry_for_s: float) -> Value:
        try:
            return tried(operation, retry_for_s)
        except FileNotFoundError:
            raise
        except OSError as error:  # includes all errors of requests
            raise DataError(f"{url}: {error} (tried for {retry_for_s:g} s)") from None


def _no_credentials(request: Any) -> Any:
    """Send no credentials to a server that the user has not named."""
    return request


def _certificate_error(error: BaseException) -> ssl.SSLCertVerificationError | None:
    """Return the certificate error that caused an error, or None."""
    while True:
        following = error.__cause__ or error.__context__
        if following is None or isinstance(error, ssl.SSLCertVerificationError):
            return error if isinstance(error, ssl.SSLCertVerificationError) else None
        error = following


def _body(answer: Any, size: int) -> bytes:
    blocks, remaining = [], size
    for block in answer.iter_content(_BLOCK):
        blocks.append(block[:remaining])
        remaining -= len(blocks[-1])
        if not remaining:
            break
    return b"".join(blocks)


@functools.cache
def _store(scheme: str, host: str, query: str) -> Store:
    if scheme in ("http", "https"):
        return WebStore(scheme, host)
    return BucketStore(scheme, host, query)


def store_of(url: DataUrl) -> Store:
    """Return the store of a URL. Stores are shared within the process."""
    return _store(url.scheme, url.host, url.query)
