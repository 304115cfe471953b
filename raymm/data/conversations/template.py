"""Chat template of a tokenizer or processor, and the learned tokens of a conversation."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast

from raymm.data.conversations.spans import aligned, learned_spans
from raymm.data.samples.media import Sample
from raymm.data.samples.placeholders import text_error
from raymm.data.samples.rows import LEARNED_ROLE
from raymm.errors import USER_CODE_RAISES, DataError, SampleError

# Passes through loops per rendering. A thousand messages of a hundred parts need a tenth of them.
MOST_PASSES = 1_000_000
_passes_left: ContextVar[list[int] | None] = ContextVar("passes_left", default=None)


@contextmanager
def limited_rendering() -> Iterator[None]:
    """Limit the renderings in a ``with`` block to :data:`MOST_PASSES` passes in total."""
    _install()
    token = _passes_left.set([MOST_PASSES])
    try:
        yield
    finally:
        _passes_left.reset(token)


def _take_pass() -> str:
    passes_left = _passes_left.get()
    if passes_left is not None:
        passes_left[0] -= 1
        if passes_left[0] < 0:
            raise SampleError(
                f"the chat template goes through its loops more than {MOST_PASSES:,} times for one "
                "sample"
            )
    return ""


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _take_pass()
        yield item


@cache
def _install() -> None:
    """Make transformers compile templates in the limited environment, in this process. The replaced
    name is private to transformers; ``tests/raymm/data/conversations/test_template.py`` fails when
    it changes."""
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers.utils import chat_template_utils

    def call(name: str, *arguments: nodes.Expr) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)

    class LimitedEnvironment(ImmutableSandboxedEnvironment):
        """Environment whose loops and macros count their passes."""

        take_pass = staticmethod(_take_pass)
        counted = staticmethod(_counted)

        def _parse(self, *arguments: Any) -> nodes.Template:
            template = super()._parse(*arguments)
            for node in [*template.find_all((nodes.For, nodes.Macro))]:
                count = nodes.ExprStmt(call("take_pass"))
                node.body.insert(0, count.set_lineno(node.lineno))
                if isinstance(node, nodes.For) and node.test is not None:
                    items = cast(nodes.Expr, node.iter)
                    node.iter = call("counted", items).set_lineno(node.lineno)
            template.set_environment(self)
            return template

    setattr(chat_template_utils, "ImmutableSandboxedEnvironment", LimitedEnvironment)  # noqa: B010
    chat_template_utils._compile_jinja_template.cache_clear()


Message = Mapping[str, Any]
# Key of a message that masks its labels; see ``Sample.messages``.
LOSS = "loss"
# Keys of messages that name a call or a speaker. Many templates do not write them, which does not
# affect the learned tokens.
_IDENTIFIERS = frozenset({"id", "name", "tool_call_id"})
# Arguments of ``render_jinja_template`` that are not template variables.
_RESERVED = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversations",
    "documents", "messages", "return_assistant_tokens_mask", "tools",
})  # fmt: skip
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "raymmprobe"


@dataclass(frozen=True)
class RenderedChat:
    """Conversation as rendered by its template, in tokens.

    Attributes:
        offsets: first and end character of each token.
        learned: True for each token that has a label.
    """

    text: str
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    learned: tuple[bool, ...]


class ChatTemplate:
    """Renders conversations and locates the tokens of the assistant.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        processor: processor that has the template, if any.
        options: variables for the template of every sample (``data.chat_template_kwargs``).
        ignored: keys of messages that the template need not write (``data.ignore_message_keys``).

    Raises:
        DataError: there is no template, or the tokenizer has no character offsets.
    """

    def __init__(
        self, tokenizer: Any, processor: Any = None, options: Mapping[str, Any] | None = None,
        ignored: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._owner = tokenizer if processor is None else processor
        self._template = getattr(processor, "chat_template", None) or tokenizer.chat_template
        self._options, self._ignored = dict(options or {}), frozenset(ignored)
        name = getattr(tokenizer, "name_or_path", "")
        if not self._template:
            raise DataError(
                f"the tokenizer {name!r} has no chat template, which 'messages' need; add one to "
                "the folder (chat_template.jinja), or use rows with 'text'"
            )
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"the tokenizer {name!r} is a {type(tokenizer).__name__}, which reports no "
                "character offsets, and labels need them; accepted: a fast tokenizer "
                "(tokenizer.json)"
            )
        self._takes: dict[str, tuple[bool, bool]] = {}
        self._has_warned = False
        self._written: set[str] = set()

    def source(self, tools: Any = None) -> str:
        """Return the Jinja source of the template. If there are several named templates,
        ``tool_use`` is used for a row with tools."""
        if not isinstance(self._template, Mapping):
            return self._template
        name = "tool_use" if tools and "tool_use" in self._template else "default"
        if name not in self._template:
            raise DataError(
                f"chat templates are named {sorted(self._template)}; accepted: one named 'default'"
            )
        return self._template[name]

    def render(
        self, messages: Sequence[Message], prompt: bool = False, tools: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation.

        Args:
            messages: in a form that the template accepts.
            prompt: append the generation prompt.
            options: variables for the template; by default those of the configuration.

        Returns:
            The text, and the character ranges of its ``{% generation %}`` blocks.

        Raises:
            Exception: any error of the template.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        source = self.source(tools)
        messages = [{k: v for k, v in m.items() if k != LOSS} for m in messages]
        options = self._options if options is None else options
        with limited_rendering():
            if not _GENERATION.search(source):
                # Some processors modify the template or the messages for some kinds of items.
                text = self._owner.apply_chat_template(
                    messages, tools=tools or None, add_generation_prompt=prompt, tokenize=False,
                    **options,
                )
                return text, []
            texts, blocks = render_jinja_template(
                conversations=[messages], tools=tools or None, chat_template=source,
                add_generation_prompt=prompt, return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **options},
            )
        return texts[0], [(int(start), int(stop)) for start, stop in blocks[0]]

    def takes(self, role: str) -> tuple[bool, bool]:
        """Return whether messages of a role may have a string, and a list of parts, as content."""
        if role not in self._takes:
            parts = [{"type": "text", "text": _PROBE}]
            self._takes[role] = (self._writes(role, _PROBE), self._writes(role, parts))
        return self._takes[role]

    def _writes(self, role: str, content: Any) -> bool:
        """Return True if the template writes the probe in a content of a role."""
        message = {"role": role, "content": content}
        for text in ("Hi.", [{"type": "text", "text": "Hi."}]):
            user = {"role": "user", "content": text}
            calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
            earlier = {"tool": [user, {"role": LEARNED_ROLE, "content": text, "tool_calls": calls}]}
            messages = (
                [message] if role == "user" else [message, user] if role == "system"
                else [*earlier.get(role, [user]), message]
            )
            try:
                rendered, _ = self.render(messages)
            except USER_CODE_RAISES:  # a template is a program: it may raise anything
                continue
            if _PROBE in rendered and not _printed(messages, rendered):
                return True
        return False

    def marker(self, part: Mapping[str, Any]) -> str:
        """Return the text that the template writes for a media part such as ``{"type": "image"}``,
        reduced to its special tokens if it has any; empty if it writes nothing."""
        before, after = ({"type": "text", "text": f"{_PROBE}{end}"} for end in ("A", "B"))
        written = ""
        # Some templates write all items of a message before its texts.
        for parts, first in (([before, part, after], before), ([part, after], None)):
            try:
                text, _ = self.render([{"role": "user", "content": parts}])
                plain, _ = self.render([{"role": "user", "content": [after]}])
            except USER_CODE_RAISES:  # a template is a program: it may raise anything
                continue
            start = text.find(first["text"]) + len(first["text"]) if first else len(
                aligned(text, plain)
            )
            written = text[start : text.find(after["text"], start)]
            if written and not _printed([{"content": [part]}], written):
                break
            written = ""
        spans = zip(*self.tokens(written), strict=True)
        special = [span for token, span in spans if token in self.special_ids]
        return written[special[0][0] : special[-1][1]] if special else written.strip()

    @cached_property
    def answer_ends(self) -> frozenset[int]:
        """Id of the special token that the template writes right after a turn of the assistant;
        empty if it writes none."""
        for text in (_PROBE, [{"type": "text", "text": _PROBE}]):
            try:
                rendered, _ = self.render([
                    {"role": "user", "content": text}, {"role": LEARNED_ROLE, "content": text},
                ])
            except USER_CODE_RAISES:  # a template is a program: it may raise anything
                continue
            if rendered.count(_PROBE) == 2:
                after = rendered.rpartition(_PROBE)[2].lstrip()
                return frozenset(self.tokens(after)[0][:1]) & self.special_ids
        return frozenset()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return special_ids(self.tokenizer)

    @cached_property
    def _special_text(self) -> re.Pattern[str]:
        tokens = [re.escape(t) for t in self.tokenizer.convert_ids_to_tokens([*self.special_ids])]
        return re.compile("|".join([r"\s", *sorted(tokens, key=len, reverse=True)]))

    def _turn_headers(self, options: Mapping[str, Any], tools: Any) -> tuple[str, str]:
        """Return the text that a generation prompt adds to a conversation, with the variables of a
        sample and without variables."""
        headers: list[str] = []
        for variables in (options, {}):
            headers.append("")
            for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
                messages = [{"role": "user", "content": content}]
                try:
                    text, _ = self.render(messages, False, tools, variables)
                    with_header, _ = self.render(messages, True, tools, variables)
                except USER_CODE_RAISES:
                    continue
                if with_header.startswith(text):
                    headers[-1] = with_header[len(text) :]
                    break
        return headers[0], headers[1]

    def tokens(
        self, text: str, special: bool = False
    ) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Return the token ids of a text, and the character range of each token. ``special`` lets
        the tokenizer add its beginning and end of text."""
        encoded = self.tokenizer(text, return_offsets_mapping=True, add_special_tokens=special)
        return tuple(encoded["input_ids"]), tuple(map(tuple, encoded["offset_mapping"]))

    def chat(
        self, sample: Sample, messages: Sequence[Message],
        special: Callable[[str], bool] = lambda text: False,
    ) -> RenderedChat:
        """Render the conversation of a sample and locate its labels.

        ``{% generation %}`` blocks of the template are learned. Without such blocks, each message
        of the assistant is learned, from the end of the generation prompt to the end of the text
        that the template writes for the message. Messages with ``loss: False`` are not learned.
        Raise a ``SampleError`` if the template fails, prints Python data, leaves out tools, tool
        calls or keys of messages, or rewrites the conversation so that turns cannot be located.

        Args:
            sample: provides tools and template variables, and is named in errors.
            messages: messages of the sample, with contents that the template accepts.
            special: returns True if the tokenizer adds its special tokens to a text; by default
                never, as in ``apply_chat_template``.
        """
        options = self.options(sample)
        messages, text, blocks = self._accepted_form(sample, messages, options)
        self._check_used(sample, messages, text, options)

        def render(some: Sequence[Message], prompt: bool = False) -> str:
            return self.render(some, prompt, sample.tools, options)[0]

        ids, offsets = self.tokens(text, special(text))
        masked = [m.get(LOSS) is False for m in messages if m["role"] == LEARNED_ROLE]
        spans, has_blocks = blocks, _GENERATION.search(self.source(sample.tools))
        if not has_blocks or any(masked):
            try:
                turns = learned_spans(
                    render, messages, text, offsets, self._turn_headers(options, sample.tools),
                    self._special_text,
                )
            except SampleError as error:
                if error.sample_id is not None:
                    raise
                raise text_error(
                    sample, f"the labels of its messages are ambiguous: {error}. Use a chat "
                    "template with {% generation %} blocks around what the assistant writes"
                ) from None
            spans = _unmasked(blocks if has_blocks else turns, turns, masked)
        if not self._has_warned:
            self._warn_of_ends(text, spans)
        learned = tuple(
            start < stop and any(start < end and begin < stop for begin, end in spans)
            for start, stop in offsets
        )
        return RenderedChat(text, ids, offsets, learned)

    def prompt(
        self, sample: Sample, messages: Sequence[Message],
        special: Callable[[str], bool] = lambda text: False,
    ) -> tuple[int, ...]:
        """Return the tokens of messages with the generation prompt; arguments as in :meth:`chat`.
        Raises a ``SampleError`` if the template fails."""
        try:
            text, _ = self.render(messages, True, sample.tools, self.options(sample))
        except MemoryError:
            raise
        except USER_CODE_RAISES as error:  # a template is a program: it may raise anything
            raise text_error(
                sample, f"the chat template failed on the prompt: {error}"
            ) from error
        return self.tokens(text, special(text))[0]

    def _warn_of_ends(self, text: str, spans: Sequence[tuple[int, int]]) -> None:
        """Warn once if a learned span ends before the token that ends its turn, or if the template
        writes no such token after the last turn."""
        starts = {start for start, _ in spans}
        tokens = [*filter(str.strip, self._special_text.findall(text))]
        for start, stop in spans:
            ending = self._special_text.match(text, stop)
            is_last = stop == len(text) and bool(tokens)
            if text[start:stop].rstrip().endswith(tuple(tokens)) or stop in starts or not (
                is_last or ending and ending[0].strip()
            ):
                continue
            self._has_warned = True
            why = "it writes no token after the last turn" if ending is None else (
                f"its labels end before {ending[0]!r}; move the token into the generation block"
            )
            warnings.warn(
                f"the model does not learn to end a turn of this chat template: {why}",
                UserWarning, stacklevel=2,
            )

    def options(self, sample: Sample) -> dict[str, Any]:
        """Return the template variables for a sample; raise a ``SampleError`` if the template does
        not use one."""
        options = {**self._options, **sample.template}
        source = self.source(sample.tools)
        for name in options:
            if name in _RESERVED:
                raise text_error(sample, f"chat_template_kwargs has {name!r}, which is reserved")
            if not _names(source, name):
                raise text_error(
                    sample, f"chat_template_kwargs has {name!r}, which the chat template does not "
                    "use; remove it"
                )
        return options

    def _accepted_form(
        self, sample: Sample, messages: Sequence[Message], options: Mapping[str, Any]
    ) -> tuple[list[Message], str, list[tuple[int, int]]]:
        """Return the messages in the first form that the template renders properly: unchanged, or
        with tool call arguments as objects or as JSON text, each with missing or empty content."""
        failure = None
        for form in _forms(messages):
            try:
                text, blocks = self.render(form, False, sample.tools, options)
            except MemoryError:
                raise
            except USER_CODE_RAISES as error:  # a template is a program: it may raise anything
                failure = failure or f"the chat template failed on its messages: {error}"
                continue
            if printed := _printed(form, text):
                failure = failure or (
                    f"the chat template prints {printed}; it expects another form of content "
                    "than the row has"
                )
                continue
            if left_out := self._left_out(sample, form, text, options):
                failure = failure or (
                    f"{left_out}, which the chat template does not write; use a template that "
                    "does, or list 'content' in data.ignore_message_keys"
                )
                continue
            return form, text, blocks
        raise text_error(sample, str(failure))

    def _left_out(
        self, sample: Sample, messages: Sequence[Message], text: str, options: Mapping[str, Any]
    ) -> str:
        """Return a description of a content that the template does not write, such as that of an
        unknown role or next to tool calls; empty if it writes all contents."""
        if "content" in self._ignored:
            return ""
        probes = [f"{_PROBE}{number}x" for number in range(len(messages))]
        probed = list(map(_replaced, messages, probes))
        # The result depends on the structure of the messages only, not on their text.
        pattern = repr((
            [(m["role"], m["content"], sorted(k for k in m if m[k])) for m in probed],
            bool(sample.tools), options,
        ))
        if pattern in self._written:
            return ""
        try:
            written, _ = self.render(probed, False, sample.tools, options)
        except USER_CODE_RAISES:  # a template is a program: it may raise anything
            written = ""
        for number, message in enumerate(messages):
            if probed[number] is message or probes[number] in written:
                continue
            changed = [*messages[:number], probed[number], *messages[number + 1 :]]
            try:
                if self.render(changed, False, sample.tools, options)[0] != text:
                    continue
            except USER_CODE_RAISES:
                continue
            return f"messages[{number}] ({message['role']}) has a content" + (
                " next to tool calls" * ("tool_calls" in message)
            )
        self._written.add(pattern)
        return ""

    def _check_used(
        self, sample: Sample, messages: Sequence[Message], text: str, options: Mapping[str, Any]
    ) -> None:
        """Raise a ``SampleError`` if the row has tools, tool calls or other keys that the template
        drops."""
        def changes(some: Sequence[Message], tools: Any) -> bool:
            try:
                return self.render(some, False, tools, options)[0] != text
            except USER_CODE_RAISES:
                return True

        if sample.tools and not changes(messages, None):
            raise text_error(
                sample, "it has 'tools', which the chat template does not write; use a template "
                "that does, or list the column in data.ignore_columns"
            )
        source, standard_keys = self.source(sample.tools), {"role", "content", LOSS, *_IDENTIFIERS}
        for number, message in enumerate(messages):
            for key in message.keys() - standard_keys - self._ignored:
                # Tool calls are learned, so each must be written. Other keys, such as reasoning,
                # may be dropped in earlier turns.
                every = key != "tool_calls"
                if not message[key] or every and _names(source, key):
                    continue
                fewer = [
                    [_without(earlier, key) if every or earlier is message else earlier
                     for earlier in messages]
                ]
                calls = message[key] if isinstance(message[key], list) and not every else []
                if len(calls) > 1:  # some templates write only one call
                    fewer += [
                        [*messages[:number], {**message, key: [*calls[:i], *calls[i + 1 :]]},
                         *messages[number + 1 :]]
                        for i in range(len(calls))
                    ]
                if not all(changes(reduced, sample.tools) for reduced in fewer):
                    raise text_error(
                        sample, f"messages[{number}] has {key!r}, which the chat template does not "
                        "write; use a template that does, or list the key in "
                        "data.ignore_message_keys"
                    )


def _replaced(message: Message, text: str) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": text} if content.strip() else message
    parts = [
        {**part, "text": text} if part["type"] == "text" and part["text"].strip() else part
        for part in content or ()
    ]
    return message if not content or parts == content else {**message, "content": parts}


def _without(message: Message, key: str) -> Message:
    """Return a message without a key; missing content becomes empty."""
    content = message["content"] if message["content"] is not None else ""
    return {**{k: v for k, v in message.items() if k != key}, "content": content}


def special_ids(tokenizer: Any) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {id for id in added if added[id].special}


def _unmasked(
    spans: Sequence[tuple[int, int]], turns: Sequence[tuple[int, int]], masked: Sequence[bool],
) -> list[tuple[int, int]]:
    """Return the spans outside of masked turns."""
    masked_turns = [turn for turn, is_masked in zip(turns, masked, strict=True) if is_masked]
    return [
        (start, stop) for start, stop in spans
        if not any(start < end and begin < stop for begin, end in masked_turns)
    ]


def _names(source: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", source) is not None


def _forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the messages unchanged, then in equivalent forms."""
    for arguments in (lambda value: value, _as_object, _as_text):
        form = [_with_arguments(message, arguments) for message in messages]
        yield form
        if any(message["content"] is None for message in form):
            yield [{**m, "content": ""} if m["content"] is None else m for m in form]
    # Some processors use another template for conversations with items of some kinds.
    yield [
        {**m, "content": [{"type": "text", "text": m["content"]}]}
        if isinstance(m["content"], str) else m
        for m in messages
    ]


def _with_arguments(message: Message, change: Any) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = [
        {**call, "function": {**call["function"],
                              "arguments": change(call["function"].get("arguments"))}}
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) else call
        for call in calls
    ]  # fmt: skip
    return {**message, "tool_calls": changed}


def _as_object(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments) if isinstance(arguments, Mapping) else arguments


def _printed(messages: Sequence[Message], text: str) -> str:
    """Return a description of data that a rendering shows as Python or JSON: parts, arguments that
    are quoted twice, missing content; empty if there is none."""
    contents = json.dumps([m.get("content") for m in messages], ensure_ascii=False)
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            for shown in (str(part), json.dumps(part), json.dumps(part, ensure_ascii=False)):
                if shown in text:
                    return f"the part {shown}"
        calls = message.get("tool_calls")
        if content is None and calls and text.count("None") > contents.count("None"):
            return "None for missing content"
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, str) and '"' in arguments and json.dumps(arguments) in text:
                return "the arguments of a tool call as a quoted string"
    return ""
