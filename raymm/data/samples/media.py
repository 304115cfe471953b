"""Sample of a row, with its media before decoding: a file, a byte range of a file, or bytes in
memory."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, BinaryIO

from raymm.data.remote.path import RemoteFile, buffered
from raymm.data.remote.store import FileVersion, store_of
from raymm.data.remote.urls import is_url, parse

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


@dataclass(frozen=True)
class MediaBytes:
    """Item whose encoded bytes are part of the row. ``name`` identifies the item in errors."""

    name: str
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class MediaRange:
    """Item that is a part of a file, such as a member of a tar shard.

    Attributes:
        version: version of a remote file when the item was located.
    """

    name: str
    path: str
    start: int
    size: int
    version: FileVersion | None = field(default=None, repr=False)


class TimedFrames(tuple):
    """Frames of one item, with ``times`` in seconds from the beginning."""

    times: tuple[float, ...]

    def __new__(cls, frames: Iterable[Any], times: Iterable[float] = ()) -> TimedFrames:
        """Create the tuple; ``times`` is only empty during unpickling."""
        timed = super().__new__(cls, frames)
        timed.times = tuple(times)
        return timed


# A path or URL, or one of the classes above; a tuple of them is one item made of frames.
Media = str | MediaBytes | MediaRange | tuple


def media_name(media: Media) -> str:
    """Return the name of an item for errors."""
    if isinstance(media, tuple):
        return media_name(media[0]) + (f" and {len(media) - 1} more frames" * (len(media) > 1))
    if isinstance(media, MediaRange):
        return f"{media.path}[{media.name}]"
    return media if isinstance(media, str) else media.name


def media_size(media: str | MediaBytes | MediaRange) -> int:
    """Return the encoded size in bytes without reading the item; errors as in :func:`open_media`.
    """
    if isinstance(media, str):
        return item_size(media) if is_url(media) else os.stat(media).st_size
    return media.size if isinstance(media, MediaRange) else len(media.data)


def open_media(media: str | MediaBytes | MediaRange) -> BinaryIO:
    """Open an item as a seekable binary file; only the requested ranges are read. Raise an
    ``OSError`` if the file does not exist, and a ``DataError`` if a server does not return the
    file. Closing may raise it for an earlier read."""
    if isinstance(media, str):
        return open_item(media) if is_url(media) else open(media, "rb")
    if isinstance(media, MediaBytes):
        return io.BytesIO(media.data)
    if is_url(media.path):
        return open_item(media.path, media.start, media.size, media.version)
    return io.BufferedReader(_Window(media))


def read_media(media: str | MediaBytes | MediaRange) -> bytes:
    """Return the encoded item; raise an ``OSError`` if it cannot be read or its file is truncated.
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
    """Byte range of a local file as a file object."""

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


@dataclass(frozen=True)
class Preference:
    """Prompt with a chosen (better) and a rejected (worse) answer; all of them messages, or all
    text."""

    prompt: Any
    chosen: Any
    rejected: Any

    @property
    def answers(self) -> tuple[Any, Any]:
        """The prompt with the chosen answer, and with the rejected answer."""
        return self.prompt + self.chosen, self.prompt + self.rejected


@dataclass(frozen=True)
class Sample:
    """One row. Exactly one of ``messages`` and ``text`` is set; for a row with two answers, from
    the chosen one.

    Attributes:
        id: the ``id`` of the row, or its place.
        messages: list of {"role": str, "content": str, list of parts or None}; a part is {"type":
            "text", "text": str} or a placeholder of a media item, {"type": "image"}. Other keys go
            to the chat template, except ``loss``: False masks the labels of the message.
        text: plain text, learned after its first ``prompt_characters`` characters.
        media: modality -> items: absolute paths (``str``), or ``raymm.data.samples.media`` objects;
            modalities without items are absent.
        place: location of the row: ``FILE:LINE``, ``FILE[INDEX]`` or ``SHARD[KEY]``.
        preference: both answers, if the row has two.
        columns: modality, ``"text"`` or ``"messages"`` -> its column in this source, where known.
        tools: function definitions for the chat template, as JSON schemas.
        template: further arguments of the chat template (``chat_template_kwargs``).
        prompt_characters: number of characters at the start of ``text`` without labels.
    """

    index: int
    id: str
    messages: list[dict] | None
    text: str | None
    media: dict[str, tuple[Media, ...]]
    source: str = ""
    place: str = ""
    preference: Preference | None = None
    columns: Mapping[str, str] = field(default_factory=dict, repr=False)
    tools: list[dict] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    prompt_characters: int = 0
