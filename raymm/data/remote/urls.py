"""Parsing and validation of data URLs."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, replace
from urllib.parse import parse_qs, quote, unquote, urlsplit

from raymm.actors.storage.bucket import OPTIONS
from raymm.actors.storage.location import BUCKETS
from raymm.packages import require

SCHEMES = (*BUCKETS, "https", "http")
ACCEPTED = "a path, or a URL that begins with s3://, gs:// or https://"
# Hosts for which an unencrypted connection is safe, as no data leaves the machine.
THIS_MACHINE = ("127.0.0.1", "localhost", "[::1]")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def is_url(text: str) -> bool:
    """Return True if a text begins with a supported URL scheme."""
    return text.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


@dataclass(frozen=True)
class DataUrl:
    """Parts of a URL.

    Attributes:
        host: the bucket, or the server including the port.
        key: path without percent-encoding and without the leading slash.
    """

    scheme: str
    host: str
    key: str
    query: str = ""

    def __str__(self) -> str:
        key = quote(self.key, safe="/*[]!$&'()+,;=:@~")
        return f"{self.scheme}://{self.host}/{key}" + (f"?{self.query}" if self.query else "")

    @property
    def in_bucket(self) -> bool:
        """True for a bucket, whose folders can be listed."""
        return self.scheme in BUCKETS

    def with_key(self, key: str) -> DataUrl:
        return replace(self, key=key)

    def within(self, folder: DataUrl) -> bool:
        """Return True if this URL is below ``folder``."""
        same_host = (self.scheme, self.host) == (folder.scheme, folder.host)
        root = folder.key.strip("/")
        return same_host and (not root or self.key.startswith(f"{root}/"))


def parse(text: str) -> DataUrl:
    """Split a URL into its parts and resolve ``.`` and ``..`` in its path. Raise a ``ValueError``
    if the URL has an unknown scheme, is incomplete, or contains credentials, and a ``ConfigError``
    if pyarrow, which reads buckets, is not installed."""
    match = _SCHEME.match(text)
    scheme = match[1].lower() if match else ""
    if scheme not in SCHEMES:
        raise ValueError(f"{scheme}:// is not known; accepted: {ACCEPTED}")
    url = urlsplit(text)
    host, key = url.netloc, posixpath.normpath(unquote(url.path)).lstrip("/")
    key = "" if key == "." else key
    if not host:
        raise ValueError(f"expected {scheme}://{'BUCKET' if scheme in BUCKETS else 'HOST'}/PATH")
    if url.fragment:
        raise ValueError("a # must be written as %23")
    if "@" in host or "secret" in url.query or "access_" in url.query:
        raise ValueError(
            "it contains credentials, which would appear in logs and checkpoints; set them in the "
            "environment of all nodes (AWS_ACCESS_KEY_ID, ...; for https in ~/.netrc), or give the "
            "nodes a role"
        )
    if scheme in BUCKETS:
        unknown = sorted(parse_qs(url.query, keep_blank_values=True).keys() - set(OPTIONS[scheme]))
        if unknown:
            accepted = ", ".join(OPTIONS[scheme])
            raise ValueError(f"?{unknown[0]}= is not known; accepted: {accepted}")
        require("pyarrow", "storage", f"{scheme}://")
    elif url.query:
        raise ValueError(
            f"it has a query (?{url.query[:20]}), which may be a signature and would appear in "
            "logs and checkpoints; accepted: an https URL without a query"
        )
    if scheme == "http" and url.hostname not in [name.strip("[]") for name in THIS_MACHINE]:
        raise ValueError("http:// is accepted for this machine only; use https:// for other hosts")
    return DataUrl(scheme, host, key, url.query)
