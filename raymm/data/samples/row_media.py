"""Media of a row: items of a column, and items in the parts of messages."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from raymm.data.remote.urls import is_url
from raymm.data.samples.folders import MediaFolders
from raymm.data.samples.headers import OTHER, Limits, kind_of
from raymm.data.samples.media import Media, MediaBytes, MediaRange, TimedFrames
from raymm.errors import SampleError

# Longest path that Linux accepts.
LONGEST_PATH = 4096
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_DATA_URI = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
# Base64 is detected by its first bytes. Shorter texts are treated as paths.
_SHORTEST_BASE64, _HEAD_CHARACTERS = 64, 1024
# Formats identified by only two bytes, with which a path may also begin: BMP, PPM, MP3.
_WEAK_HEADS = (b"BM", b"P5", b"P6", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
# Part types of OpenAI and other APIs -> kind.
_KINDS = {
    "image_url": "image", "input_image": "image", "video_url": "video", "audio_url": "audio",
    "input_audio": "audio",
}
_ITEM_KEYS = ("path", "url", "base64", "bytes")


@dataclass(frozen=True)
class MediaRules:
    """Rules for the media of a row.

    Attributes:
        place: location of the row, part of the name of items without a path.
        frames: modalities whose items are lists of frames.
        parts: type of a message part -> modality.
    """

    folders: MediaFolders
    limits: Limits = Limits()
    place: str = ""
    frames: frozenset[str] = frozenset()
    parts: Mapping[str, str] | None = None


def items_of(
    value: object, column: str, rules: MediaRules, frames: bool = False
) -> tuple[Media, ...]:
    """Return the items of a media column. Raise a ``SampleError`` for another value, an item above
    a limit, or a path outside the folders.

    Args:
        value: a path, bytes, base64 of a known format, a ``data:`` URI, {"path", "bytes", "url"} as
            ``datasets`` stores media, a ``MediaRange``, or a list of them; None, "" or [] for no
            items.
        frames: True if every item is made of frames: a list is one item, a list of lists is
            several.
    """
    if value is None or (isinstance(value, str | list | tuple) and not value):
        return ()
    values = list(value) if isinstance(value, list | tuple) else [value]
    if frames:
        groups: list[Any] = values if all(isinstance(v, list) for v in values) else [values]
        if not all(groups):
            raise SampleError(f"column {column!r} has an item without frames", column)
        return tuple(
            _frames(group, column, rules, f"{rules.place}.{column}[{number}]")
            for number, group in enumerate(groups)
        )
    return tuple(
        _item(source, column, rules, f"{rules.place}.{column}[{number}]")
        for number, source in enumerate(values)
    )


class PartMedia:
    """Collector of the media in message parts.

    Attributes:
        items: modality -> items, in the order of the parts.
    """

    def __init__(self, rules: MediaRules, column: str) -> None:
        self.items: dict[str, list[Media]] = {}
        self.unused: set[str] = set()
        self._rules, self._column = rules, column
        self._places: dict[str, int] = {}

    def take(self, messages: list[dict]) -> list[dict]:
        """Collect the items of messages, and return the messages with placeholder parts such as
        ``{"type": "image"}``. Raise a ``SampleError`` for an unusable item, or one without a
        modality."""
        return [
            {
                **message,
                "content": [
                    self._part(part, f"{self._column}[{number}].content[{index}]")
                    for index, part in enumerate(message["content"])
                ],
            }
            if isinstance(message["content"], list) else message
            for number, message in enumerate(messages)
        ]

    def _part(self, part: dict, where: str) -> dict:
        fields = {key: value for key, value in part.items() if value is not None and key != "type"}
        if part["type"] == "text":
            kinds = {*_KINDS, *_KINDS.values(), *(self._rules.parts or ())}
            if media := sorted(set(fields) & kinds):
                raise SampleError(
                    f"{where} has type 'text' and {media[0]!r}; accepted: a separate part for "
                    f"each item, {{'type': {media[0]!r}, {media[0]!r}: ...}}", self._column,
                )
            self.unused |= set(fields) - {"text"}
            return {"type": "text", "text": part["text"]}
        type_name: str = part["type"]
        kind = _KINDS.get(type_name, type_name)
        names = (type_name, kind, f"{kind}_url", *_ITEM_KEYS)
        sources = {key: fields[key] for key in names if fields.get(key) not in (None, "", [])}
        modality_of = self._rules.parts or {}
        part_type = type_name if type_name in modality_of else kind
        self._check_index(fields.get("index"), part_type, where, bool(sources))
        # Times are only used for lists of frames; video files contain times.
        is_list = any(isinstance(value, list | tuple) for value in sources.values())
        timing = {"fps", "times"} & set(fields) if is_list else set()
        self.unused |= {
            key for key, value in fields.items()
            if key not in (*names, "index", *timing) and (key, value) != ("text", "")
        }
        if not sources:
            return {"type": part_type}
        if part_type not in modality_of:
            raise SampleError(
                f"{where} has an item of type {type_name!r}, but no modality accepts it; accepted "
                f"types: {sorted(modality_of) or 'none'}. Add the modality to data.modalities",
                self._column,
            )
        modality = modality_of[part_type]
        item = self._item(sources, modality, where)
        if timing:
            item = _timed(cast(tuple, item), fields, where, self._column)
        self.items.setdefault(modality, []).append(item)
        return {"type": part_type}

    def _check_index(self, index: Any, place: str, where: str, inline: bool) -> None:
        if inline:
            return
        number = self._places.get(place, 0)
        self._places[place] = number + 1
        if index is not None and index != number:
            raise SampleError(
                f"{where} has index {index!r}, but it is the part for item {number} of the row; "
                "accepted: parts in the order of the items", self._column,
            )

    def _item(self, sources: dict[str, Any], modality: str, where: str) -> Media:
        names = set(sources)
        value: Any = sources if names <= set(_ITEM_KEYS) else None
        if len(sources) == 1 and value is None:
            (value,) = sources.values()
        if value is None:
            raise SampleError(f"{where} has {sorted(names)}; accepted: one of them", self._column)
        if isinstance(value, dict):
            settings = set(value) - {*_ITEM_KEYS, "data", "format"}
            self.unused |= {key for key in settings if value[key] is not None}
            value = {key: value[key] for key in value if key not in settings}
        name = f"{self._rules.place}.{where}"
        if isinstance(value, list | tuple):
            return _frames(list(value), self._column, self._rules, name)
        item = _item(value, self._column, self._rules, name)
        return (item,) if modality in self._rules.frames else item


def _timed(
    frames: tuple[Media, ...], part: Mapping[str, Any], where: str, column: str
) -> TimedFrames:
    """Return frames with the times from their part: ``fps``, or ``times`` in seconds."""
    times = part.get("times")
    if times is None:
        fps = part["fps"]
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
            raise SampleError(
                f"{where} has fps {fps!r}; accepted: frames per second, above 0", column
            )
        return TimedFrames(frames, [number / fps for number in range(len(frames))])
    if not isinstance(times, list) or len(times) != len(frames) or not all(
        isinstance(time, int | float) and not isinstance(time, bool) for time in times
    ):
        raise SampleError(
            f"{where} has times that are not a number of seconds for each of its {len(frames)} "
            "frames", column,
        )
    if "fps" in part:
        raise SampleError(f"{where} has fps and times; accepted: one of them", column)
    return TimedFrames(frames, times)


def _frames(values: list, column: str, rules: MediaRules, name: str) -> tuple[Media, ...]:
    return tuple(
        _item(value, column, rules, f"{name}[{frame}]") for frame, value in enumerate(values)
    )


def _item(value: object, column: str, rules: MediaRules, name: str) -> Media:
    if isinstance(value, str) and value:
        return _from_text(value, column, rules, name)
    if isinstance(value, bytes):
        return MediaBytes(name, value)
    if isinstance(value, MediaRange):
        return value
    if isinstance(value, dict):
        fields = {key: item for key, item in value.items() if item is not None}
        if "data" in fields and set(fields) <= {"data", "format"}:  # OpenAI's input_audio
            fields = {"bytes": fields["data"]}
        if set(fields) <= set(_ITEM_KEYS) and isinstance(value, dict):
            return _from_dict(fields, column, rules, name)
    raise SampleError(
        f"column {column!r} must be a path or a list of paths (or bytes, or {{'path', 'bytes'}}), "
        f"got {_short(value)}",
        column,
    )


def _from_dict(fields: Mapping[str, Any], column: str, rules: MediaRules, name: str) -> Media:
    path, data = fields.get("path"), fields.get("bytes", fields.get("base64"))
    if isinstance(data, str):
        data = _decoded(data, column, rules.limits)
    if isinstance(data, bytes):
        return MediaBytes(f"{name} {path!r}" if path else name, data)
    source = fields.get("url", path)
    if data is None and isinstance(source, str) and source:
        return _from_text(source, column, rules, name)
    if data is None and not source:
        raise SampleError(f"column {column!r} has an item with neither 'bytes' nor 'path'", column)
    raise SampleError(
        f"column {column!r} has an item whose 'bytes' are {type(data).__name__} and whose path is "
        f"{type(source).__name__}; accepted: bytes or base64, or a path", column,
    )


def _from_text(text: str, column: str, rules: MediaRules, name: str) -> Media:
    if match := _DATA_URI.match(text):
        return MediaBytes(name, _decoded(text[match.end() :], column, rules.limits))
    if _is_base64_media(text):
        return MediaBytes(name, _decoded(text, column, rules.limits))
    text = text.removeprefix("file://")
    _check_path(text, column)
    return rules.folders.path(text, column)


def _is_base64_media(text: str) -> bool:
    """Return True for base64 of a known format, judged by its length and first bytes."""
    if len(text) < _SHORTEST_BASE64 or len(text.rstrip()) % 4:
        return False
    head = text[:_HEAD_CHARACTERS]
    if not _BASE64.fullmatch(head) or not _BASE64.fullmatch(text):
        return False
    head = "".join(head.split())
    try:
        data = base64.b64decode(head[: len(head) // 4 * 4])
    except ValueError:
        return False
    return not data.startswith(_WEAK_HEADS) and kind_of(io.BytesIO(data)) != OTHER


def _decoded(text: str, column: str, limits: Limits) -> bytes:
    """Decode base64, with or without padding and line ends; raise a ``SampleError`` for invalid
    base64, or more bytes than the limit."""
    size = len(text) * 3 // 4
    if size > limits.max_item_bytes + 4:
        raise SampleError(
            f"it has {size:,} bytes, above data.max_item_bytes ({limits.max_item_bytes:,})", column
        )
    text = "".join(text.split()).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError as error:
        raise SampleError(f"column {column!r} has invalid base64: {error}", column) from None


def _check_path(value: str, column: str) -> None:
    """Raise a ``SampleError`` for a text that cannot be the path of a file."""
    if value.startswith("data:"):
        problem, cure = "a data: URI without base64", "accepted: data:TYPE;base64,..."
    elif (match := _URL.match(value)) is not None and not is_url(value):
        problem, cure = f"a {match[1]} URL", "it is not fetched: download it and give its path"
    elif len(value) > LONGEST_PATH:
        problem = f"a text of {len(value):,} characters, not a path"
        cure = "it is not base64 of a known format either; accepted: a path, bytes or base64"
    elif "\0" in value:
        problem, cure = "a path with a null character", "give the path of a file"
    elif not value:
        problem, cure = "an empty path", "give the path of a file"
    else:
        return
    raise SampleError(f"column {column!r} has {problem} ({value[:60]!r}); {cure}", column)


def _short(value: object) -> str:
    keys = f" with {sorted(map(str, value))}" if isinstance(value, dict) else ""
    return type(value).__name__ + keys
