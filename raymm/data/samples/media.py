"""Media items that are not decoded yet: a file, a byte range of a file, or bytes in memory."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from raymm.data.remote.items import item_size, open_item
from raymm.data.remote.store import FileVersion
from raymm.data.remote.urls import is_url


@dataclass(frozen=True)
class MediaBytes:
    """An item whose encoded bytes came with its row.

    Attributes:
        name: name in errors, such as the path that was stored with the bytes.
        data: the encoded file.
    """

    name: str
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class MediaRange:
    """An item that is a part of a file, such as a member of a tar shard.

    Attributes:
        name: the member's name.
        path: the file it lies in, or its URL.
        start, size: byte range.
        version: which the file was when it was found, if that is known.
    """

    name: str
    path: str
    start: int
    size: int
    version: FileVersion | None = field(default=None, repr=False)


class TimedFrames(tuple):
    """Frames of one item, with the time of each.

    Args:
        frames: media of the frames.
        times: of each, in seconds from the beginning.
    """

    times: tuple[float, ...]

    def __new__(cls, frames: Iterable[Any], times: Iterable[float] = ()) -> TimedFrames:
        """Make the tuple; without times only while it is unpickled."""
        timed = super().__new__(cls, frames)
        timed.times = tuple(times)
        return timed


# A path or URL, or one of the above; a tuple of them is one item made of frames.
Media = str | MediaBytes | MediaRange | tuple


def media_name(media: Media) -> str:
    """Return the name of an item in errors."""
    if isinstance(media, tuple):
        return media_name(media[0]) + (f" and {len(media) - 1} more frames" * (len(media) > 1))
    if isinstance(media, MediaRange):
        return f"{media.path}[{media.name}]"
    return media if isinstance(media, str) else media.name


def media_size(media: str | MediaBytes | MediaRange) -> int:
    """Encoded size in bytes, without reading it.

    Raises:
        OSError: there is no such file.
        DataError: a server does not say.
    """
    if isinstance(media, str):
        return item_size(media) if is_url(media) else os.stat(media).st_size
    return media.size if isinstance(media, MediaRange) else len(media.data)


def open_media(media: str | MediaBytes | MediaRange) -> BinaryIO:
    """A seekable binary file of the item, of which only what is asked for is read.

    Raises:
        OSError: there is no such file.
        DataError: a server does not give it; also when it is closed, of what a library read.
    """
    if isinstance(media, str):
        return open_item(media) if is_url(media) else open(media, "rb")
    if isinstance(media, MediaBytes):
        return io.BytesIO(media.data)
    if is_url(media.path):
        return open_item(media.path, media.start, media.size, media.version)
    return io.BufferedReader(_Window(media))


def read_media(media: str | MediaBytes | MediaRange) -> bytes:
    """The encoded item.

    Raises:
        OSError: it cannot be read, or its file ends before it does.
    """
    if isinstance(media, MediaBytes):
        return media.data
    with open_media(media) as file:
        data = file.read()
    if isinstance(media, MediaRange) and len(data) < media.size:
        raise OSError(
            f"{media.path} ends {media.size - len(data)} bytes before the end of {media.name!r}"
        )
    return data


class _Window(io.RawIOBase):
    """A byte range of a file as a file."""

    def __init__(self, media: MediaRange):
        self._file = open(media.path, "rb", buffering=0)
        self._start, self._size, self._at = media.start, media.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer) -> int:
        view = memoryview(buffer)[: max(self._size - self._at, 0)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
