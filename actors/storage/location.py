"""Locations of runs: folders and URLs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from raymm.actors.storage.bucket import OPTIONS, RETRY_FOR_S, BucketFolder, connect
from raymm.actors.storage.custom_file_system import is_custom
from raymm.actors.storage.folder import LocalFolder, StorageFolder
from raymm.packages import require

BUCKETS = tuple(OPTIONS)
ACCEPTED = (
    "a folder, or a URL that begins with file://, s3:// or gs://, a scheme of fsspec, or "
    "module:function:// for a function that returns a file system"
)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*|[^\W\d][\w.]*:[^\W\d]\w*)://")
_ONE_SLASH = re.compile(r"(file|s3|gs):(?!//)")


def is_bucket(location: str) -> bool:
    """Return True for the URL of a bucket, or of a folder in a custom file system."""
    match = _SCHEME.match(location)
    return match is not None and match[1].lower() != "file"


def check_location(location: str) -> str:
    """Return a location in normal form: a URL of a bucket or a custom file system, or a path. Raise
    a ``ValueError`` if the URL is not supported, is incomplete, or contains credentials, or its
    function does not return a file system, and a ``ConfigError`` if pyarrow is not installed, or
    the function cannot be imported."""
    if _ONE_SLASH.match(location):
        raise ValueError(f"a URL has two slashes after its scheme; accepted: {ACCEPTED}")
    if (match := _SCHEME.match(location)) is None:
        return location
    scheme, url = match[1], urlsplit(location[match.end(1) + 1 :])
    scheme = scheme if ":" in scheme else scheme.lower()
    if scheme == "file":
        if url.netloc not in ("", "localhost") or not url.path.startswith("/"):
            raise ValueError("expected file:///PATH: a file:// URL must not name another host")
        return unquote(url.path)
    if scheme not in BUCKETS and not is_custom(scheme):
        raise ValueError(f"{scheme}:// is not known; accepted: {ACCEPTED}")
    if not url.netloc or not url.path.strip("/"):
        raise ValueError(f"expected {scheme}://BUCKET/FOLDER")
    options = parse_qs(url.query, keep_blank_values=True)
    if "@" in url.netloc or "secret" in url.query or "access_" in url.query:
        raise ValueError(
            "it has credentials, which would appear in logs and checkpoints; set them in the "
            "environment of all nodes (AWS_ACCESS_KEY_ID, ...), or give the nodes a role"
        )
    if unknown := sorted(options.keys() - set(accepted := OPTIONS.get(scheme, ()))):
        raise ValueError(f"?{unknown[0]}= is not known; accepted: {', '.join(accepted) or 'none'}")
    if url.fragment:
        raise ValueError("a # must be written as %23")
    require("pyarrow", "storage", f"{scheme}://")
    if ":" in scheme:
        connect(scheme, url.netloc, url.query)
    return f"{scheme}{location[len(scheme):]}"


def storage_folder(
    location: str | os.PathLike[str], retry_for_s: float = RETRY_FOR_S
) -> StorageFolder:
    """Return the folder at a location, without accessing it. Raise a ``ValueError`` if the URL is
    not accepted."""
    text = check_location(os.fspath(location))
    return BucketFolder(text, retry_for_s) if is_bucket(text) else LocalFolder(Path(text))
