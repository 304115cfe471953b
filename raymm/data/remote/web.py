"""Data files on web servers that support range requests."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable
from threading import local
from typing import Any, TypeVar
from urllib.parse import urljoin

from raymm.actors.storage.bucket import CONNECT_TIMEOUT_S, SILENT_TIMEOUT_S, tried
from raymm.data.remote.store import OPEN_RETRY_FOR_S, READ_RETRY_FOR_S, FileVersion, Store, changed
from raymm.data.remote.urls import DataUrl
from raymm.errors import DataError

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
