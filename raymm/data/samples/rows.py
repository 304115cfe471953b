"""Checks a row of any format and makes a sample's parts of its values."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from raymm.data.remote.urls import is_url
from raymm.data.samples.errors import RowError
from raymm.data.samples.folders import MediaFolders
from raymm.data.samples.media import Media, MediaBytes, MediaRange
from raymm.data.samples.sample import Preference

TEXT, MESSAGES, ID = "text", "messages", "id"
PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
TEXT_ROLES = (TEXT, MESSAGES, PROMPT, CHOSEN, REJECTED, ID)
# The role whose messages are labels.
LEARNED_ROLE = "assistant"
# Linux takes no longer one.
LONGEST_PATH = 4096
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


class RowText(NamedTuple):
    """What a row has of text, as :class:`raymm.data.samples.sample.Sample` says it."""

    messages: list[dict] | None
    text: str | None
    preference: Preference | None = None


def text_of(row: object, columns: Mapping[str, str]) -> RowText:
    """The text of a row.

    Args:
        row: column -> value.
        columns: where ``"text"``, ``"messages"``, ... are under another name.

    Raises:
        RowError: neither or both, or not of the form that ``Sample`` describes.
    """
    if not isinstance(row, dict):
        raise RowError(f"a sample is a JSON object, got {type(row).__name__}")
    text_column, messages_column = columns.get(TEXT, TEXT), columns.get(MESSAGES, MESSAGES)
    messages, text = row.get(messages_column), row.get(text_column)
    if messages is None and text is None:
        names = [columns.get(role, role) for role in (PROMPT, CHOSEN, REJECTED)]
        prompt, *answers = map(row.get, names)
        if None not in answers:
            return _preference(prompt, answers, names)
        raise RowError(
            f"a sample needs {messages_column!r} or {text_column!r}, or 'prompt', 'chosen' and "
            f"'rejected'; it has "
            f"{sorted(map(str, row))}. A source's columns may say other names: "
            "columns: {messages: conversations}"
        )
    if messages is not None and text is not None:
        raise RowError(f"a sample has {messages_column!r} or {text_column!r}, not both")
    if messages is not None:
        return RowText(_messages(messages, messages_column), None)
    if not isinstance(text, str):
        raise RowError(
            f"{text_column!r} must be a string, got {type(text).__name__}", text_column
        )
    return RowText(None, text)


def _preference(prompt: object, answers: list[Any], columns: list[str]) -> RowText:
    """Of a row in TRL's preference format.

    Args:
        prompt: messages or text; None if both answers' messages begin with it.
        answers: the chosen and the rejected one.
        columns: of these three.
    """
    values = answers if prompt is None else [prompt, *answers]
    if prompt is not None and all(isinstance(value, str) for value in values):
        preference = Preference(prompt, *answers)
        return RowText(None, preference.answers[0], preference)
    for value, column in zip(values, columns[-len(values) :], strict=True):
        if isinstance(value, str):
            what = "messages too" if prompt is not None else "given with a prompt, or messages"
            raise RowError(f"{column!r} is a text; accepted: {what}, in all of {columns}", column)
    *first, chosen, rejected = (
        _messages(value, column)
        for value, column in zip(values, columns[-len(values) :], strict=True)
    )
    if prompt is None:
        count = 0
        while count < min(len(chosen), len(rejected)) and chosen[count] == rejected[count]:
            count += 1
        first, chosen, rejected = [chosen[:count]], chosen[count:], rejected[count:]
        if not (first[0] and chosen and rejected):
            raise RowError(
                f"{columns[1]!r} and {columns[2]!r} must begin with the same messages and go on "
                f"with others, as there is no {columns[0]!r}", columns[1],
            )
    preference = Preference(first[0], chosen, rejected)
    return RowText(preference.answers[0], None, preference)


def _messages(messages: object, column: str) -> list[dict]:
    if isinstance(messages, dict) and messages and all(map(_is_list, messages.values())):
        # Sequence({"role": ..., "content": ...}) of datasets: a dict of lists of one length.
        messages = [
            dict(zip(messages, values, strict=False))
            for values in zip(*messages.values(), strict=False)
        ]
    if not isinstance(messages, list) or not messages:
        raise RowError(f"{column!r} must be a list with at least one message", column)
    for number, message in enumerate(messages):
        where = f"{column}[{number}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"{where} needs a string 'role'{_sharegpt(message)}", column)
        content = message.get("content")
        if isinstance(content, list):
            for place, part in enumerate(content):
                _check_part(part, f"{where}.content[{place}]", column)
        elif not isinstance(content, str):
            raise RowError(f"{where} needs a string 'content', or a list of parts", column)
    return messages


def _sharegpt(message: object) -> str:
    """What to do with messages that call their fields otherwise."""
    if isinstance(message, dict) and {"from", "value"} <= set(message):
        return (
            "; it has 'from' and 'value'. Write {'role': {'human': 'user', 'gpt': 'assistant', "
            "'system': 'system'}[m['from']], 'content': m['value']} for every message m"
        )
    return f"; it has {sorted(map(str, message))}" if isinstance(message, dict) else ""


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _check_part(part: object, where: str, column: str) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RowError(f"{where} must be a part with a string 'type'", column)
    if part["type"] == "text" and not isinstance(part.get("text"), str):
        raise RowError(f"{where} has type 'text' and needs a string 'text'", column)


def items_of(
    value: object, column: str, folders: MediaFolders, place: str, frames: bool = False
) -> tuple[Media, ...]:
    """The items that a value of a media column stands for.

    Args:
        value: a path, bytes, {"path": ..., "bytes": ...} as ``datasets`` stores media, a
            ``MediaRange``, a list of such, or None / "" / [] for none.
        column: its column, for errors.
        folders: where the files may lie.
        place: the row's place, the name of items that have bytes and no path.
        frames: every item is made of frames: a list is one item, a list of lists several.

    Raises:
        RowError: anything else.
        OutsideError: a path that leaves the folders.
    """
    if value is None or (isinstance(value, str | list | tuple) and not value):
        return ()
    values = list(value) if isinstance(value, list | tuple) else [value]
    if frames:
        groups: list[Any] = values if all(map(_is_list, values)) else [values]
        if not all(groups):
            raise RowError(f"column {column!r} has an item without frames", column)
        return tuple(
            tuple(_item(source, column, folders, f"{place}.{column}[{number}][{frame}]")
                  for frame, source in enumerate(group))
            for number, group in enumerate(groups)
        )
    return tuple(
        _item(source, column, folders, f"{place}.{column}[{number}]")
        for number, source in enumerate(values)
    )


def count_items(
    value: object, column: str, folders: MediaFolders, frames: bool = False
) -> int:
    """How many items :func:`items_of` would give; nothing is read.

    Args:
        value, column, folders, frames: as of :func:`items_of`.
    """
    return len(items_of(value, column, folders, "", frames))


def _item(value: object, column: str, folders: MediaFolders, name: str) -> Media:
    if isinstance(value, str) and value:
        _check_path(value, column)
        return folders.path(value, column)
    if isinstance(value, bytes):
        return MediaBytes(name, value)
    if isinstance(value, MediaRange):
        return value
    if isinstance(value, dict) and set(value) <= {"path", "bytes"}:
        path, data = value.get("path"), value.get("bytes")
        if isinstance(data, bytes):
            return MediaBytes(f"{name} {path!r}" if path else name, data)
        if data is None and isinstance(path, str) and path:
            _check_path(path, column)
            return folders.path(path, column)
        if data is None:
            raise RowError(f"column {column!r} has an item with neither 'bytes' nor 'path'", column)
    raise RowError(
        f"column {column!r} must be a path or a list of paths (or bytes, or {{'path', 'bytes'}}), "
        f"got {_short(value)}",
        column,
    )


def _check_path(value: str, column: str) -> None:
    """
    Raises:
        RowError: something that stands for a file, but is no path of one.
    """
    if value.startswith("data:"):
        what, cure = "a data: URI", "store its bytes ({'bytes': ...}), or a file and its path"
    elif (match := _URL.match(value)) is not None and not is_url(value):
        what, cure = f"a {match[1]} URL", "it is not fetched: download it, and give its path"
    elif len(value) > LONGEST_PATH:
        what = f"a text of {len(value):,} characters, which is no path"
        cure = "base64 is not decoded: store bytes ({'bytes': ...}), or a file and its path"
    elif "\0" in value:
        what, cure = "a path with a null character", "give the path of a file"
    else:
        return
    raise RowError(f"column {column!r} has {what} ({value[:60]!r}); {cure}", column)


def _short(value: object) -> str:
    keys = f" with {sorted(map(str, value))}" if isinstance(value, dict) else ""
    return type(value).__name__ + keys
