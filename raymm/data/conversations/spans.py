"""Location of the turns of the assistant in a rendered conversation.

A turn begins where the prompt for it ends (the conversation so far, with the generation prompt) and
ends where the rendering of the conversation up to it ends. Most templates only append, so both are
prefixes of the entire rendering. Other templates rewrite earlier turns when messages follow
(thinking templates, tools in the last user message). For these, the text between two contents is
compared instead; contents are located by rendering the conversation once more with a mark in them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raymm.data.samples.rows import LEARNED_ROLE
from raymm.errors import USER_CODE_RAISES, SampleError

Message = Mapping[str, Any]
Render = Callable[..., str]
# A generation prompt may open or close a reasoning block, which belongs to the turn.
_REASONING = re.compile(r"<think>\s*(</think>\s*)?\Z")
# Contains private-use characters, which conversations do not contain.
_MARK = "\ue4f3mark\ue4f4"


def aligned(first: str, second: str) -> str:
    return os.path.commonprefix((first, second))


def learned_spans(
    render: Render, messages: Sequence[Message], text: str, offsets: Sequence[tuple[int, int]],
    headers: tuple[str, str], special: re.Pattern[str],
) -> list[tuple[int, int]]:
    """Return the first and end character of each message of the assistant, in order. Raise a
    ``SampleError`` if a turn cannot be located.

    Args:
        render: renders messages; with ``prompt=True``, adds a generation prompt.
        offsets: character ranges of the tokens of the text.
        headers: the generation prompt alone, with the variables of the sample and without
            variables.
        special: matches one special token or one white space character.
    """
    finder = _Finder(render, messages, text, offsets, headers, special)
    spans: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message["role"] != LEARNED_ROLE:
            continue
        start, stop = finder.start(number), finder.stop(number)
        if start > stop or spans and start < spans[-1][1]:
            raise SampleError(f"messages[{number}] cannot be located in the rendered conversation")
        # A space after the end of a turn is part of the first token of the next one.
        stop = start + len(text[start:stop].rstrip(" "))
        spans.append((start, finder.ending(stop)))
    return spans


class _Finder:
    """Locates the turns of one conversation; arguments as in :func:`learned_spans`."""

    def __init__(
        self, render: Render, messages: Sequence[Message], text: str,
        offsets: Sequence[tuple[int, int]], headers: tuple[str, str], special: re.Pattern[str],
    ) -> None:
        self._render, self._messages, self._text = render, messages, text
        self._boundaries = {0, len(text)}.union(*offsets) if offsets else {0, len(text)}
        full, plain = (_REASONING.sub("", header) for header in headers)
        common = aligned(full, plain)
        self._header = full if full[len(common) :].strip() else common
        self._extra, self._special = len(full) - len(self._header), special
        self._offsets = offsets

    def start(self, number: int) -> int:
        prompt = self._prompt(number)
        if prompt is None or not self._text.startswith(prompt):
            return self._rewritten_start(number, prompt)
        if self._header and prompt.endswith(self._header):
            return len(prompt)
        # Without a generation prompt, the text before the content may be the header of the turn.
        content = self._content_start(number)
        has_header = content is not None and self._text[len(prompt) : content].strip()
        return content if content is not None and has_header else len(prompt)

    def _prompt(self, number: int) -> str | None:
        prompt = self._try(self._messages[:number], prompt=True)
        if prompt is None:
            return None
        prompt = _REASONING.sub("", prompt)
        return prompt[: len(prompt) - self._extra]

    def _rewritten_start(self, number: int, prompt: str | None) -> int:
        content = self._content_start(number)
        if number == 0:
            if content is None:
                raise SampleError("the chat template does not write messages[0]")
            positions = range(content, -1, -1)
            starts = (i for i in positions if self._text[i : i + 1] == self._header[:1])
            ends = (self._after_header(i, self._header, content) for i in starts)
            start = next((end for end in ends if end is not None and end <= content), None)
            if self._header and start is None:
                raise SampleError("messages[0] does not begin with the generation prompt")
            default = content if self._text[:content].strip() else 0
            return default if start is None else start
        text_end = self._content_end(self._messages, number - 1, self._text)
        if prompt is None or text_end is None:
            raise SampleError(f"the chat template cannot render a prompt for messages[{number}]")
        prompt_end = self._content_end(self._messages[:number], number - 1, prompt, prompt=True)
        if prompt_end is None:
            raise SampleError(f"the chat template does not write messages[{number - 1}]")
        start = self._after_header(text_end, prompt[prompt_end:], content)
        if start is None:
            raise SampleError(f"the text before messages[{number}] differs from the prompt for it")
        return start

    def _after_header(self, place: int, header: str, content: int | None) -> int | None:
        """Return the end of a header that starts at a position; None if the text differs. The text
        may lack the end of the header if that end is white space, or if the content follows (a
        prompt may open a reasoning block)."""
        length = self._common(place, header)
        end, remainder = place + length, header[length:]
        return end if not remainder.strip() or length and end == content else None

    def stop(self, number: int) -> int:
        if number + 1 == len(self._messages):
            self._check_end(number)
            return len(self._text)
        messages, index = self._messages[: number + 1], number
        so_far = self._try(messages)
        if so_far is not None and self._text.startswith(so_far):
            return len(so_far)
        if so_far is None:  # some templates render nothing without a user message
            messages, index = [{"role": "user", "content": "Hi."}, *messages], number + 1
            so_far = self._try(messages)
        text_end = self._content_end(self._messages, number, self._text)
        rendered_end = None if so_far is None else self._content_end(messages, index, so_far)
        if text_end is None or rendered_end is None or so_far is None:
            raise SampleError(f"the chat template does not write messages[{number}]")
        closing = so_far[rendered_end:]
        length = self._common(text_end, closing)
        if self._special.sub("", closing[length:]):
            raise SampleError(
                f"the chat template ends messages[{number}] differently when messages follow"
            )
        return text_end + length

    def _check_end(self, number: int) -> None:
        """Raise a ``SampleError`` if the text continues after the last turn. Some templates always
        append the generation prompt."""
        if self._header:
            return
        extended = [*self._messages, {"role": "user", "content": "Hi."}]
        followed = self._try(extended)
        text_end = self._content_end(self._messages, number, self._text)
        extended_end = None if followed is None else self._content_end(extended, number, followed)
        if text_end is None or extended_end is None or followed is None:
            return
        if self._special.sub(
            "", self._text[text_end + self._common(text_end, followed[extended_end:]) :]
        ):
            raise SampleError(
                f"the chat template ends messages[{number}] differently when messages follow"
            )

    def ending(self, stop: int) -> int:
        """Return the end of a turn including its end token. If the template writes no such token,
        or another one after the last turn, the next special token counts (``<|user|>`` of GLM)."""
        length = len(self._text[:stop].rstrip())
        last = next((span for span in reversed(self._offsets) if span[1] <= length), (0, 0))
        if self._special.fullmatch(self._text, *last):
            return stop
        ending = self._special.match(self._text, stop)
        return ending.end() if ending and ending[0].strip() else stop

    def _try(self, messages: Sequence[Message], prompt: bool = False) -> str | None:
        try:
            return self._render(messages, prompt=prompt)
        except USER_CODE_RAISES:  # a template is a program: it may raise anything
            return None

    def _common(self, place: int, other: str) -> int:
        """Return the number of characters from a position on that match another text, in whole
        tokens."""
        stop = place + len(aligned(self._text[place : place + len(other)], other))
        while stop not in self._boundaries:
            stop -= 1
        return max(stop - place, 0)

    def _content_start(self, number: int) -> int | None:
        """Return the position of the content of a message in the text; None if the content is
        missing."""
        changed = self._changed(self._messages, number, lambda content: _MARK)
        position = len(aligned(self._text, changed)) if changed is not None else 0
        return position if changed is not None and changed[position:].startswith(_MARK) else None

    def _content_end(
        self, messages: Sequence[Message], number: int, text: str, prompt: bool = False
    ) -> int | None:
        """Return the end of the content of a message in a rendering; None if the content is
        missing."""
        changed = self._changed(messages, number, lambda content: (content or "") + _MARK, prompt)
        if changed is None:
            return None
        position = len(aligned(text, changed))
        return position if changed[position:].lstrip().startswith(_MARK) else None

    def _changed(
        self, messages: Sequence[Message], number: int, change: Callable[[str], str],
        prompt: bool = False,
    ) -> str | None:
        content = messages[number]["content"]
        if isinstance(content, list):
            mark = change("")
            media_parts = content if change("x") != mark else []
            new_content: Any = [*media_parts, {"type": "text", "text": mark}]
        else:
            new_content = change(content)
        message = {**messages[number], "content": new_content}
        return self._try([*messages[:number], message, *messages[number + 1 :]], prompt)
