"""Conversion of one conversation by transformers alone: the reference for rows of every form.

Nothing here imports raymm. Token ids and media tensors come from ``apply_chat_template`` of the
processor or tokenizer. Labels follow a slow definition: the assistant's turns are found in the
rendered text by their header and their end token, both listed here for every template. Templates
with ``{% generation %}`` blocks mark the learned text themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils.chat_template_utils import render_jinja_template

from benchmarks.shared.templates import Shape

IGNORED = -100
_CHATML = r"<\|im_start\|>assistant\n"
_LLAMA = r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n"
# Template -> pattern of the text before an assistant's turn: the end of the generation prompt,
# without a reasoning block that the prompt opens.
_HEADERS = {
    **dict.fromkeys((
        "chatml", "qwen2_5", "qwen2_5_vl", "qwen3", "qwen3_vl", "qwen3_5_think", "internvl",
        "qwen2_audio",
    ), _CHATML),
    "llama3_1": _LLAMA, "llama3_2_vision": _LLAMA,
    "gemma3": r"<start_of_turn>model\n",
    "mistral_v3": r"\[/INST\](?!\[INST\])|\[/TOOL_RESULTS\](?!\[TOOL_RESULTS\])",
    "mistral_small": r"\[/INST\](?!\[INST\])|\[/SYSTEM_PROMPT\](?!\[INST\])",
    "llava_next": r" \[/INST\](?!\[INST\])|^(?= )",
    "idefics3": r"Assistant:", "smolvlm": r"Assistant:",
    "glm4moe": r"<\|assistant\|>", "glm4_5v": r"<\|assistant\|>",
}  # fmt: skip
# Text around an item's token that the template writes.
_BEFORE = re.compile(r"(?:<\|vision_start\|>|<\|begin_of_(?:image|video)\|>)$")
_AFTER = re.compile(r"<\|vision_end\|>|<\|end_of_(?:image|video)\|>")
# GLM has no end-of-turn token: the model writes the next role, which the last turn lacks.
_GLM_END = r"<\|(?:user|observation|system)\|>|$"


@dataclass(frozen=True)
class Expected:
    """Row, converted by hand.

    Attributes:
        messages: as ``apply_chat_template`` takes them; a media part holds its decoded item under
            its type (``{"type": "image", "image": PIL.Image}``).
        text: plain text instead of messages; ``{eos}`` is the tokenizer's end of text.
        prompt: characters at the start of ``text`` that are not learned.
        template: additional arguments of the template.
        learned: one bool per assistant message, True if it has labels; None for all.
    """

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    prompt: int = 0
    tools: list[dict] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    learned: tuple[bool, ...] | None = None


class CannotRenderError(Exception):
    """Error for a conversation that the template or the processor rejects."""


def media_items(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield kind and value of every media item of a conversation, in order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] != "text":
                yield part["type"], part[part["type"]]


def as_taken(messages: Sequence[Mapping[str, Any]], shape: Shape) -> list[dict[str, Any]]:
    """Convert contents to the form that the template renders, as its users have to."""
    converted = []
    for message in messages:
        content, takes = message.get("content"), shape.takes
        if message["role"] == "system" and not shape.system:
            takes = "texts"
        if isinstance(content, str) and takes == "parts":
            content = [{"type": "text", "text": content}]
        elif isinstance(content, list) and takes == "texts":
            content = "".join(part["text"] for part in content)
        converted.append({**message, "content": content})
    return converted


def reference(
    processor: Any, shape_name: str, shape: Shape, row: Expected, clip: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the processor's or tokenizer's output for one row, with ``labels``.

    Args:
        processor: a processor with a tokenizer, or a tokenizer.
        shape_name: name of the template in ``SHAPES``.
        clip: ``video_metadata`` of every video.

    Raises:
        CannotRenderError: the template or the processor raises, or an item has no placeholder.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    if row.messages is None:
        return _plain(tokenizer, processor, row)
    messages = as_taken(row.messages, shape)
    template = processor.chat_template
    arguments = {"tools": row.tools, **row.template}
    try:
        text = processor.apply_chat_template(messages, tokenize=False, **arguments)
        output = _encode(processor, tokenizer, messages, text, arguments, clip)
    except Exception as error:  # templates and processors raise errors of any type
        raise CannotRenderError(f"{type(error).__name__}: {error}") from error
    for message in messages:  # a string or a list with one text
        if message["role"] == "system" and (said := message["content"]) and (
            (said if isinstance(said, str) else said[0]["text"]) not in text
        ):
            raise CannotRenderError("the template drops the system message")
    offsets = [tuple(span) for span in output.pop("offset_mapping")[0]]
    replaced = _replaced(processor, text, output.pop("text_replacement_offsets", None))
    if len(replaced) != len(list(media_items(messages))):
        raise CannotRenderError(f"{len(replaced)} placeholders in {text!r}")
    if "{% generation" in template or "{%- generation" in template:
        # As in transformers, keys without a value are left out.
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        _, indices = render_jinja_template(
            conversations=[given], chat_template=template, return_assistant_tokens_mask=True,
            **arguments, **tokenizer.special_tokens_map,
        )
        spans = [tuple(span) for span in indices[0]]
    else:
        spans = turns(text, shape_name, shape)
    replies = [message for message in messages if message["role"] == "assistant"]
    if len(spans) != len(replies):
        raise AssertionError(f"{len(spans)} turns for {len(replies)} messages in {text!r}")
    learned = row.learned or (True,) * len(spans)
    items = [_item_span(text, item["span"], replaced) for item in replaced]
    spans = [
        (_moved(start, replaced), _moved(stop, replaced))
        for (start, stop), wanted in zip(spans, learned, strict=True) if wanted
    ]
    ids = output["input_ids"]
    labels = ids.clone()
    for place, span in enumerate(offsets):
        if not any(map(_overlaps(span), spans)) or any(map(_overlaps(span), items)):
            labels[0, place] = IGNORED
    labels[0, 0] = IGNORED  # no token predicts the first token
    return {**output, "labels": labels}


def turns(text: str, shape_name: str, shape: Shape) -> list[tuple[int, int]]:
    """Return the spans of the assistant's turns in a rendered text.

    A span begins after the header and ends with the end-of-turn token and the line break that the
    template writes after it.
    """
    header = re.compile(_HEADERS[shape_name])
    end = re.compile(_GLM_END if shape_name.startswith("glm") else re.escape(shape.eos) + r"\n*")
    spans, place = [], 0
    while (match := header.search(text, place)) is not None:
        stop = end.search(text, match.end())
        assert stop is not None, f"a turn of {text!r} does not end"
        spans.append((match.end(), stop.end()))
        place = max(stop.end(), match.end() + 1)
    return spans


def trl_mask(processor: Any, row: Expected, shape: Shape, clip: Mapping[str, Any]) -> Any:
    """Return input ids and labels of TRL's ``assistant_only_loss``; None if TRL does not support
    the template.
    """
    from trl.chat_template_utils import get_training_chat_template

    if row.messages is None or row.learned is not None:
        return None
    try:
        template = get_training_chat_template(processor)
    except ValueError:
        return None
    output = processor.apply_chat_template(
        as_taken(row.messages, shape), chat_template=template, tools=row.tools, tokenize=True,
        return_dict=True, return_assistant_tokens_mask=True, **_options(processor, clip),
        **row.template,
    )
    ids, mask = output["input_ids"], output["assistant_masks"]
    ids, mask = (ids[0], mask[0]) if isinstance(ids[0], list) else (ids, mask)
    return ids, [token if learned else IGNORED for token, learned in zip(ids, mask, strict=True)]


def _options(processor: Any, clip: Mapping[str, Any]) -> dict[str, Any]:
    if not hasattr(processor, "tokenizer"):
        return {}
    return {"processor_kwargs": dict(clip)}


def _plain(tokenizer: Any, processor: Any, row: Expected) -> dict[str, torch.Tensor]:
    """Encode text without a template: all of it is learned, or all after the prompt."""
    text = (row.text or "").replace("{eos}", tokenizer.eos_token)
    output = dict(processor(text=[text], return_tensors="pt"))
    first, second = output["input_ids"][0, :2].tolist()
    if first == second == tokenizer.bos_token_id:  # Mllama's processor adds one as well
        output = dict(processor(text=[text], return_tensors="pt", add_special_tokens=False))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    labels = output["input_ids"].clone()
    first = labels.shape[1] - len(encoded["input_ids"])  # special tokens come before the text
    assert labels[0, first:].tolist() == encoded["input_ids"]
    for place, (_, stop) in enumerate(encoded["offset_mapping"]):
        if stop <= row.prompt:
            labels[0, first + place] = IGNORED
    labels[0, : first if row.prompt else 1] = IGNORED
    return {**output, "labels": labels}


def _encode(
    processor: Any, tokenizer: Any, messages: list, text: str, arguments: dict, clip: Mapping
) -> dict[str, Any]:
    if processor is tokenizer:
        output = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_tensors="pt"
        )
        direct = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", **arguments
        )
        assert torch.equal(direct["input_ids"], output["input_ids"]), text
        return {**output, "offset_mapping": output["offset_mapping"].tolist()}
    options = {"return_offsets_mapping": True, "return_text_replacement_offsets": True}
    videos = any(kind == "video" for kind, _ in media_items(messages))
    output = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt",
        processor_kwargs=options | (dict(clip) if videos else {}), **arguments,
    )
    return {**output, "offset_mapping": output["offset_mapping"].tolist()}


def _replaced(processor: Any, text: str, offsets: Any) -> list[dict[str, Any]]:
    """Return the spans of placeholders in the rendered text, with their replacements."""
    if isinstance(offsets, list):
        return offsets[0] if offsets else []
    mark = getattr(processor, "image_token", None)
    places = [match.span() for match in re.finditer(re.escape(mark), text)] if mark else []
    return [{"span": place, "new_span": place} for place in places]  # Mllama keeps its placeholders


def _item_span(
    text: str, span: tuple[int, int], replaced: Sequence[Mapping[str, Any]]
) -> tuple[int, int]:
    """Return the span of an item in the expanded text, including the text around its token."""
    before, after = _BEFORE.search(text[: span[0]]), _AFTER.match(text, span[1])
    start, stop = before.start() if before else span[0], after.end() if after else span[1]
    return _moved(start, replaced), _moved(stop, replaced)


def _moved(place: int, replaced: Sequence[Mapping[str, Any]]) -> int:
    """Convert an offset in the rendered text to the text with expanded placeholders."""
    before = [item for item in replaced if item["span"][1] <= place]
    return place + (before[-1]["new_span"][1] - before[-1]["span"][1] if before else 0)


def _overlaps(span: tuple[int, int]) -> Any:
    return lambda other: span[0] < other[1] and span[1] > other[0]
