"""Conversation in the form for the processor of a model, and its labels.

A processor replaces the marker of each item by as many tokens as the item has. The text between the
items keeps its tokens, so the labels of the plain text can be located among the processor's tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.data.conversations.processor import ModelProcessor
from raymm.data.conversations.template import ChatTemplate, RenderedChat
from raymm.data.samples.config import KINDS, ModalityDataConfig
from raymm.data.samples.media import Sample
from raymm.data.samples.placeholders import check_parts, part_types, text_error
from raymm.plural import plural

Media = Mapping[str, Sequence[Any]]
# Number of tokens without a label that are compared on each side of the learned tokens.
_CONTEXT = 4


@dataclass(frozen=True)
class Conversation:
    """Rendered sample with decoded items.

    Attributes:
        text: rendering, with a marker for each item.
        media: decoded items by kind.
        learned: True for each token that has a label.
        runs: token ranges of the text before, between and after the items.
        rejected: the same prompt with the rejected answer, if the row has two answers.
    """

    sample: Sample
    text: str
    media: Media = field(repr=False)
    ids: tuple[int, ...] = field(repr=False)
    learned: tuple[bool, ...] = field(repr=False)
    runs: tuple[range, ...] = field(repr=False)
    rejected: Conversation | None = field(default=None, repr=False)

    @property
    def id(self) -> str:
        return self.sample.id

    @property
    def rows(self) -> tuple[Conversation, ...]:
        """This conversation, followed by the rejected one if there is one; a row each."""
        return (self,) if self.rejected is None else (self, self.rejected)

    @property
    def row_ids(self) -> tuple[str, ...]:
        """An id for each of :attr:`rows`."""
        if self.rejected is None:
            return (self.id,)
        return f"{self.id}:chosen", f"{self.id}:rejected"

    def with_media(self, media: Media) -> Conversation:
        """Return the conversation with other items in all of its rows."""
        rejected = self.rejected and self.rejected.with_media(media)
        return replace(self, media=media, rejected=rejected)

    @property
    def has_labels(self) -> bool:
        """True if any token outside the items is learned."""
        return any(self.learned[i] for run in self.runs for i in run)

    def labels(self, ids: Sequence[int]) -> list[int]:
        """Return the labels of the processor's tokens ``ids``; tokens of items have none. Raise a
        ``SampleError`` if the tokens between the items differ from those of the text, or fit in
        several places."""
        labels = [IGNORE_INDEX] * len(ids)
        runs = [run for run in map(self._compared, self.runs) if run]
        forward, backward = self._places(ids, runs, 1), self._places(ids, runs, -1)
        if forward is None or forward != backward:
            raise text_error(
                self.sample, "the processor's tokens between its items "
                + ("differ from the text's" if forward is None else "fit in more than one place")
                + ", so the tokens of the assistant cannot be located",
            )
        for run, position in zip(runs, forward, strict=True):
            for offset, i in enumerate(run):
                if self.learned[i]:
                    labels[position + offset] = self.ids[i]
        if labels:
            labels[0] = IGNORE_INDEX  # nothing predicts the first token
        return labels

    def _compared(self, run: range) -> range:
        """Return the learned tokens of a run with some tokens around them. Tokens next to an item
        are omitted, because they may merge with the text of the item. The last run extends to its
        end."""
        learned = [i for i in run if self.learned[i]]
        if not learned:
            return range(0)
        first = run.start + (run is not self.runs[0] and not self.learned[run.start])
        end = run.stop - (not self.learned[run.stop - 1])
        last = run.stop if run is self.runs[-1] else min(end, learned[-1] + 1 + _CONTEXT)
        return range(max(first, learned[0] - _CONTEXT), last)

    def _places(self, ids: Sequence[int], runs: Sequence[range], step: int) -> list[int] | None:
        """Return the positions of the runs in the processor's tokens: each at its first possible
        position (step 1) or its last (step -1); the last run is at the end. None if a run is
        missing."""
        run_tokens = [[self.ids[i] for i in run] for run in runs]
        if not run_tokens:
            return []
        has_end = runs[-1].stop == len(self.ids)
        limit = len(ids) - (len(run_tokens[-1]) if has_end else 0)
        if limit < 0 or has_end and list(ids[limit:]) != run_tokens[-1]:
            return None
        positions, first = [], 0
        inner = run_tokens[:-1] if has_end else run_tokens
        for tokens in inner[::step]:
            last = limit - len(tokens)
            tried = range(first, last + 1) if step > 0 else range(last, first - 1, -1)
            position = next((i for i in tried if list(ids[i : i + len(tokens)]) == tokens), None)
            if position is None:
                return None
            positions.append(position)
            first, limit = (position + len(tokens), limit) if step > 0 else (first, position)
        end = [len(ids) - len(run_tokens[-1])] if has_end else []
        return positions[::step] + end

    def after_media(self) -> int | None:
        """Return the number of last tokens that cannot belong to an item; None for a sample without
        items."""
        return len(self.runs[-1]) if any(self.media.values()) else None


def conversation(
    processor: ModelProcessor, sample: Sample, chat: RenderedChat, media: Media
) -> Conversation:
    """Combine a rendered sample with its items. Raise a ``SampleError`` if the numbers of markers
    and items differ.

    Args:
        media: decoded items, in the order of their markers.
    """
    for kind, items in media.items():
        if items and not processor.markers.get(kind):
            raise text_error(
                sample, f"the row has {plural(len(items), 'item')} of kind {kind!r}, which the "
                "model's processor does not accept; accepted: "
                f"{', '.join(k for k, marker in processor.markers.items() if marker) or 'text'}"
            )
    marker_spans: list[tuple[int, int]] = []
    for marker in dict.fromkeys(filter(None, processor.markers.values())):
        kinds = [kind for kind, text in processor.markers.items() if text == marker]
        items = sum(len(media.get(kind, ())) for kind in kinds)
        matches = [match.span() for match in re.finditer(re.escape(marker), chat.text)]
        if len(matches) < items:
            raise text_error(
                sample, f"the chat template writes {len(matches)} of the row's "
                f"{plural(items, 'item')} "
                f"({', '.join(kinds)}); put them into messages of a role whose items it writes, "
                "such as 'user'",
            )
        if len(matches) > items:
            raise text_error(
                sample, f"its text contains {marker!r}, which stands for an item "
                f"({', '.join(kinds)}), {plural(len(matches), 'time')}, but the row has "
                f"{plural(items, 'such item')}; "
                "remove the rest from texts of the row",
            )
        marker_spans += matches
    for token, (first, _) in zip(chat.ids, chat.offsets, strict=True):
        if token in processor.item_ids and not any(a <= first < b for a, b in marker_spans):
            name = processor.tokenizer.convert_ids_to_tokens(token)
            raise text_error(
                sample, f"its text contains {name!r}, which is the processor's token for an item; "
                "remove it from texts of the row",
            )
    runs, start, count = [], 0, len(chat.ids)
    for begin, end in sorted(marker_spans):
        first = next((i for i in range(start, count) if chat.offsets[i][1] > begin), start)
        runs.append(range(start, first))
        # An end-of-text token added by the tokenizer has the offsets (0, 0).
        start = next(
            (i for i in range(first, count) if chat.offsets[i][0] >= end or not chat.offsets[i][1]),
            count,
        )
    runs.append(range(start, count))
    return Conversation(sample, chat.text, media, chat.ids, chat.learned, tuple(runs))


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
