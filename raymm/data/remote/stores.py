"""Lookup of the store for a URL."""

from __future__ import annotations

import functools

from raymm.data.remote.bucket import BucketStore
from raymm.data.remote.store import Store
from raymm.data.remote.urls import DataUrl
from raymm.data.remote.web import WebStore


@functools.cache
def _store(scheme: str, host: str, query: str) -> Store:
    if scheme in ("http", "https"):
        return WebStore(scheme, host)
    return BucketStore(scheme, host, query)


def store_of(url: DataUrl) -> Store:
    """Return the store of a URL. Stores are shared within the process."""
    return _store(url.scheme, url.host, url.query)
