"""Messages of a row in the form that the chat template of a processor accepts: strings or lists of
parts, with a part, or the processor's token, for every media item."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from raymm.data.conversations.template import ChatTemplate
from raymm.data.samples.config import KINDS, ModalityDataConfig
from raymm.data.samples.placeholders import check_parts, part_types, text_error
from raymm.data.samples.sample import Sample
from raymm.plural import plural


def template_messages(
    sample: Sample, modalities: Mapping[str, ModalityDataConfig], template: ChatTemplate,
    item_tokens: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Return the messages of a sample with a placeholder for each of its items.

    In a text, ``<image>``, ``<video>`` and ``<audio>`` (or ``placeholder`` of the modality) are
    placeholders; a backslash before the mark makes it literal text. Items of a kind without any
    placeholder come at the start of the first user message, as in TRL. Strings stay strings if the
    template accepts strings for the role, and lists stay lists if it accepts lists. ``item_tokens``
    has, by kind, the token that represents an item in a text. Raise a ``SampleError`` if the
    numbers of placeholders and items differ, or the template accepts no media."""
    types = part_types(modalities)
    check_parts(sample, types)
    marks = {m.placeholder or f"<{kind}>": kind for kind, m in modalities.items()}
    contents = [
        None if message["content"] is None else list(_parts(message["content"], types, marks))
        for message in sample.messages or ()
    ]
    _place_items(sample, contents, modalities, marks)
    return [
        {**message, "content": _content(sample, message, parts, template, item_tokens)}
        for message, parts in zip(sample.messages or (), contents, strict=True)
    ]


def _parts(
    content: Any, types: Mapping[str, str], marks: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the parts of a content, with each mark as a separate part."""
    every = {*marks, *(f"<{kind}>" for kind in KINDS)}
    pattern = re.compile(rf"(\\?(?:{'|'.join(map(re.escape, every))}))")
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        if part["type"] != "text":
            yield {"type": types[part["type"]]}
            continue
        text = ""
        for run in pattern.split(part["text"]):
            if run in marks:
                if text:
                    yield {"type": "text", "text": text}
                yield {"type": marks[run]}
                text = ""
            else:
                text += run[1:] if run[:1] == "\\" and run[1:] in every else run
        if text or not part["text"]:
            yield {"type": "text", "text": text}


def _place_items(
    sample: Sample, contents: list[list[dict[str, Any]] | None],
    modalities: Mapping[str, ModalityDataConfig], marks: Mapping[str, str],
) -> None:
    """Add placeholders for items of kinds that have none, and check the numbers."""
    counts = Counter(
        part["type"] for parts in contents for part in parts or () if part["type"] != "text"
    )
    users = (
        parts for message, parts in zip(sample.messages or (), contents, strict=True)
        if message["role"] == "user" and parts is not None
    )
    first = next(users, None)
    missing = []
    for kind in modalities:
        items = len(sample.media.get(kind, ()))
        if items and not counts[kind] and first is not None:
            missing += [{"type": kind}] * items
        elif counts[kind] != items:
            mark = next(mark for mark, mark_kind in marks.items() if mark_kind == kind)
            raise text_error(
                sample,
                f"the messages have places for {plural(counts[kind], 'item')} of kind {kind!r}, "
                "but the row "
                f"has {items}; a place is a part {{'type': {kind!r}}}, or {mark!r} in the text "
                f"('\\{mark}' is literal text)",
            )
    if first is not None:
        first[:0] = missing


def _content(
    sample: Sample, message: Mapping[str, Any], parts: list[dict[str, Any]] | None,
    template: ChatTemplate, item_tokens: Mapping[str, str],
) -> Any:
    """Return the content of a message in a form that the template accepts for its role."""
    if parts is None:
        return None
    strings, lists = template.takes(message["role"])
    has_media = any(part["type"] != "text" for part in parts)
    is_string = isinstance(message["content"], str)
    if lists and (has_media or not is_string or not strings):
        return parts
    for part in parts:
        if part["type"] != "text" and part["type"] not in item_tokens:
            raise text_error(
                sample, f"the processor's chat template does not accept {part['type']!r} parts in "
                f"messages of the role {message['role']!r}"
            )
    return "".join(
        part["text"] if part["type"] == "text" else item_tokens[part["type"]] for part in parts
    )
