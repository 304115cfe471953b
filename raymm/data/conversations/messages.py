"""Messages of a row as a processor's chat template takes them: lists of parts, of which those of
media stand in the order of the row's items."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from raymm.data.samples.config import ModalityDataConfig
from raymm.data.samples.placeholders import check_parts, part_types, text_error
from raymm.data.samples.sample import Sample


def part_messages(
    sample: Sample, modalities: Mapping[str, ModalityDataConfig], takes_parts: bool
) -> list[dict[str, Any]]:
    """The messages of a sample, with a part of its kind for every item.

    A text may have the place of an item as ``<image>``, ``<video>`` or ``<audio>``, or what
    ``placeholder`` of the modality says.

    Args:
        sample: it has messages.
        modalities: by kind (``image``, ``video``, ``audio``).
        takes_parts: whether the template takes lists of parts; else texts stay texts.

    Raises:
        SampleError: another number of places than of items, or media for a template that takes
            texts alone.
    """
    types = part_types(modalities)
    check_parts(sample, types)
    marks = {m.placeholder or f"<{kind}>": kind for kind, m in modalities.items()}
    messages = [
        {**message, "content": list(_parts(message["content"], types, marks))}
        for message in sample.messages or ()
    ]
    counts = Counter(
        part["type"] for message in messages for part in message["content"]
        if part["type"] != "text"
    )
    for kind in modalities:
        items = len(sample.media.get(kind, ()))
        if counts[kind] != items:
            mark = next(mark for mark, own in marks.items() if own == kind)
            raise text_error(
                sample,
                f"the messages have places for {counts[kind]} items of kind {kind!r}, the row has "
                f"{items}; a place is a part {{'type': {kind!r}}}, or {mark!r} in the text",
            )
    if takes_parts:
        return messages
    if counts:
        raise text_error(sample, "the processor's chat template takes texts alone, and no media")
    return [
        {**message, "content": "".join(part["text"] for part in message["content"])}
        for message in messages
    ]


def _parts(
    content: Any, types: Mapping[str, str], marks: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        if part["type"] != "text":
            yield {"type": types[part["type"]]}
            continue
        pattern = "|".join(map(re.escape, marks)) or r"(?!)"
        for text in re.split(f"({pattern})", part["text"]):
            if text in marks:
                yield {"type": marks[text]}
            elif text:
                yield {"type": "text", "text": text}
