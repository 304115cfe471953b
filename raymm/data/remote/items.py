"""Media items by URL. One request returns the size and the first bytes, which often are all bytes.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from threading import Lock
from typing import BinaryIO

from raymm.data.remote.file import RemoteFile, buffered
from raymm.data.remote.store import FileVersion
from raymm.data.remote.stores import store_of
from raymm.data.remote.urls import parse

# Bytes that the first request of an item reads, and the number of items for which they are cached:
# the header of an item is read shortly before its content.
HEAD_BYTES = 2**20
HEADS_KEPT = 16
# Bytes per request after the first.
BLOCK = 2**18

_Part = tuple[str, int, int | None]
_heads: OrderedDict[_Part, tuple[FileVersion, int, bytes]] = OrderedDict()
_lock = Lock()


def _head(part: _Part, version: FileVersion | None) -> tuple[FileVersion, int, bytes]:
    """Return the version of the file, the size of the part in bytes, and its first bytes."""
    with _lock:
        if (cached := _heads.get(part)) is not None:
            _heads.move_to_end(part)
            return cached
    text, start, size = part
    url = parse(text)
    if size is None:
        current, data = store_of(url).head(url, HEAD_BYTES)
        cached = current, current.size, data
    else:
        version = version or store_of(url).version(url)
        length = min(size, HEAD_BYTES)
        data = store_of(url).read(url, start, length, version) if length else b""
        cached = version, size, data
    with _lock:
        _heads[part] = cached
        while len(_heads) > HEADS_KEPT:
            _heads.popitem(last=False)
    return cached


def item_size(url: str) -> int:
    """Return the size of a file in bytes; see :func:`open_item` for errors."""
    return _head((url, 0, None), None)[1]


def open_item(
    url: str, start: int = 0, size: int | None = None, version: FileVersion | None = None
) -> BinaryIO:
    """Open a file, or the byte range ``start``, ``size`` of one; small ones are in memory. Raise a
    ``FileNotFoundError`` if the file does not exist, and a ``DataError`` if the server does not
    answer, or denies access.

    Args:
        version: version of the file when the range was located; None for the current one.
    """
    current, length, head = _head((url, start, size), version)
    if len(head) >= length:
        return io.BytesIO(head)
    return buffered(RemoteFile(parse(url), current, start, length, head), BLOCK)
