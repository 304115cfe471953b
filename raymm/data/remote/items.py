"""Media by URL: one request tells an item's size and brings its first bytes, of most all."""

from __future__ import annotations

import io
from collections import OrderedDict
from threading import Lock
from typing import BinaryIO

from raymm.data.remote.file import RemoteFile, buffered
from raymm.data.remote.store import FileVersion
from raymm.data.remote.stores import store_of
from raymm.data.remote.urls import parse

# Of every item so much is read with the first request, and kept for so many: header and content
# of an item are asked for one after the other.
HEAD_BYTES = 2**20
HEADS_KEPT = 16
# Bytes of a request where more than the first bytes are read.
BLOCK = 2**18

_Part = tuple[str, int, int | None]
_heads: OrderedDict[_Part, tuple[FileVersion, int, bytes]] = OrderedDict()
_lock = Lock()


def _head(part: _Part, version: FileVersion | None) -> tuple[FileVersion, int, bytes]:
    """A part's file's version, its size, and its first bytes."""
    with _lock:
        if (kept := _heads.get(part)) is not None:
            _heads.move_to_end(part)
            return kept
    text, start, size = part
    url = parse(text)
    if size is None:
        current, data = store_of(url).head(url, HEAD_BYTES)
        kept = current, current.size, data
    else:
        version = version or store_of(url).version(url)
        length = min(size, HEAD_BYTES)
        data = store_of(url).read(url, start, length, version) if length else b""
        kept = version, size, data
    with _lock:
        _heads[part] = kept
        while len(_heads) > HEADS_KEPT:
            _heads.popitem(last=False)
    return kept


def item_size(url: str) -> int:
    """Bytes of a file.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: the server does not say.
    """
    return _head((url, 0, None), None)[1]


def open_item(
    url: str, start: int = 0, size: int | None = None, version: FileVersion | None = None
) -> BinaryIO:
    """A file, or a part of one, as a binary file; small ones are in memory.

    Args:
        url: of the file.
        start, size: the part; all by default.
        version: which the file was when the part was found.

    Raises:
        FileNotFoundError, DataError: as of :func:`item_size`.
    """
    current, whole, head = _head((url, start, size), version)
    if len(head) >= whole:
        return io.BytesIO(head)
    return buffered(RemoteFile(parse(url), current, start, whole, head), BLOCK)
