"""Which tokens of a conversation are learned: those of the assistant's turns.

A processor replaces an item's placeholder by as many tokens as the item has, which only it knows.
What is after the last item it does not touch: there the tokens are those of the plain text, counted
from the end. A reply that items follow is found at the end of the conversation up to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raymm.data.conversations.processor import ModelProcessor
from raymm.data.samples.placeholders import text_error
from raymm.data.samples.rows import LEARNED_ROLE
from raymm.data.samples.sample import Sample
from raymm.data.samples.text import IGNORE_INDEX, end_of_turn, special_ids
from raymm.errors import USER_CODE_RAISES

Media = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Reply:
    """A reply that is learned, in a text that it is at the end of.

    Attributes:
        text: the conversation up to its end.
        media: items of that.
        ids: tokens of the text from the reply on, which the processor leaves as they are.
        learned: how many of them are.
        last: whether no item follows.
    """

    text: str
    media: Media
    ids: tuple[int, ...]
    learned: int
    last: bool


@dataclass(frozen=True)
class Conversation:
    """A sample, ready for the processor.

    Attributes:
        sample: it.
        text: all of it, with a placeholder per item.
        media: by kind, its items, decoded.
        replies: what is learned of it.
    """

    sample: Sample
    text: str
    media: Media = field(repr=False)
    replies: tuple[Reply, ...] = field(repr=False)

    @property
    def id(self) -> str:
        """Of the sample."""
        return self.sample.id

    def labels(self, ids: Sequence[int], process: Callable[[str, Media], list[int]]) -> list[int]:
        """Labels of its tokens.

        Args:
            ids: its tokens as the processor has made them.
            process: makes tokens of a text and its items.

        Raises:
            SampleError: the processor's tokens are not those of the text.
        """
        labels = [IGNORE_INDEX] * len(ids)
        for reply in self.replies:
            stop = len(ids)
            if not reply.last:
                so_far = process(reply.text, reply.media)
                stop = len(so_far)
                if list(ids[:stop]) != so_far:
                    raise _changed(self.sample)
            start = stop - len(reply.ids)
            if start < 0 or tuple(ids[start:stop]) != reply.ids:
                raise _changed(self.sample)
            labels[start : start + reply.learned] = reply.ids[: reply.learned]
        if labels:
            labels[0] = IGNORE_INDEX  # nothing predicts the first token
        return labels

    def after_media(self) -> int | None:
        """How many of its last tokens are certainly of no item; None for all."""
        if not any(self.media.values()):
            return None
        return max((len(reply.ids) for reply in self.replies if reply.last), default=0)


def conversation(
    processor: ModelProcessor, sample: Sample, messages: Sequence[Mapping[str, Any]], media: Media
) -> Conversation:
    """A sample with its replies.

    Args:
        processor: of the model.
        sample: it has ``messages``.
        messages: these, whose content is lists of parts.
        media: its items, decoded, in the order of the parts.

    Raises:
        SampleError: the template fails, or changes what it has written when messages follow.
    """
    text = _render(processor, sample, messages)
    special = special_ids(processor.tokenizer)
    replies = []
    for number, message in enumerate(messages):
        if message["role"] != LEARNED_ROLE:
            continue
        prompt = _render(processor, sample, messages[:number], prompt=True)
        whole = number + 1 == len(messages)
        so_far = text if whole else _render(processor, sample, messages[: number + 1])
        if not so_far.startswith(prompt) or not text.startswith(so_far):
            raise text_error(
                sample,
                f"the chat template is not prefix-consistent at messages[{number}]: what it writes "
                "of the conversation so far changes when the next message is added",
            )
        before, after = _counts(messages[: number + 1]), _counts(messages[number:])
        last = not after
        end = text if last else so_far  # so that the reply is counted from its end
        ids, places = processor.tokens(end)
        start = next((i for i, (_, stop) in enumerate(places) if stop > len(prompt)), len(ids))
        stop = next((i for i, (_, to) in enumerate(places) if to > len(so_far)), len(ids))
        if start < len(ids) and places[start][0] < len(prompt):
            raise text_error(
                sample, f"a token is of messages[{number}] and of what is before it: what a model "
                "is asked would be other tokens than those it learns from",
            )
        own = end_of_turn(processor.tokenizer, ids[:stop], start, special)
        items = {kind: tuple(each[: before[kind]]) for kind, each in media.items()}
        replies.append(Reply(end, media if last else items, tuple(ids[start:]), own - start, last))
    return Conversation(sample, text, media, tuple(replies))


def plain(processor: ModelProcessor, sample: Sample, text: str) -> Conversation:
    """A sample of text alone, all of which is learned.

    Args:
        processor: of the model.
        sample: it has ``text``.
        text: that.
    """
    ids, _ = processor.tokens(text)
    return Conversation(sample, text, {}, (Reply(text, {}, tuple(ids), len(ids), True),))


def _counts(messages: Sequence[Mapping[str, Any]]) -> Counter[str]:
    return Counter(
        part["type"] for message in messages for part in message["content"]
        if part["type"] != "text"
    )


def _render(
    processor: ModelProcessor, sample: Sample, messages: Sequence[Mapping[str, Any]],
    prompt: bool = False,
) -> str:
    try:
        return processor.render(messages, prompt)
    except USER_CODE_RAISES as error:  # a template is a program: it may raise anything
        raise text_error(
            sample, f"the chat template failed on its first {len(messages)} messages: {error}"
        ) from error


def _changed(sample: Sample) -> Exception:
    return text_error(
        sample, "the processor's tokens after its last item are not those of the text: which are "
        "the assistant's is not known"
    )
