"""Positions of media in the text: list-form messages, placeholder tokens, and their counts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raymm.data.samples.config import ModalityDataConfig
from raymm.data.samples.media import Sample
from raymm.errors import DataError, SampleError
from raymm.plural import plural

_PROBE = "raymmprobe"


@dataclass(frozen=True)
class Placeholder:
    """Placeholder of a modality in token ids.

    Attributes:
        repeat: number of tokens that replace each one in the text; None leaves them unchanged.
    """

    token: str
    id: int
    repeat: int | None


def find_placeholders(
    tokenizer, modalities: Mapping[str, ModalityDataConfig]
) -> dict[str, Placeholder]:
    """Return the placeholders of the modalities that have one; raise a ``DataError`` for a
    placeholder that is not one token of the tokenizer."""
    placeholders = {}
    for name, modality in modalities.items():
        token = modality.placeholder
        if token is None:
            if modality.placeholder_tokens is not None:
                raise DataError(
                    f"data.modalities.{name}.placeholder_tokens is "
                    f"{modality.placeholder_tokens}, but there is no placeholder to repeat; set "
                    f"data.modalities.{name}.placeholder or model.merge.{name}"
                )
            continue
        ids = tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1 or (ids[0] == tokenizer.unk_token_id and token != tokenizer.unk_token):
            raise DataError(
                f"data.modalities.{name}.placeholder is {token!r}, which is "
                f"{len(ids)} tokens or unknown; expected one token of the tokenizer"
            )
        placeholders[name] = Placeholder(token, ids[0], modality.placeholder_tokens)
    return placeholders


def part_types(modalities: Mapping[str, ModalityDataConfig]) -> dict[str, str]:
    """Return the modality of each type of a message part."""
    types: dict[str, str] = {}
    for name, modality in modalities.items():
        column = modality.column or name
        names = [name, column, column.removesuffix("s")] + ["image"] * (name == "vision")
        for type_name in [modality.part] if modality.part else names:
            types.setdefault(type_name, name)
    return types


def check_parts(sample: Sample, types: Mapping[str, str]) -> None:
    """Check that the media parts of list-form messages match the items of the sample. Messages
    without media parts are accepted, because their text may contain placeholders. Raise a
    ``SampleError`` if a part has an unknown type or contains media, or the numbers of parts and
    items differ."""
    counts: Counter = Counter()
    for number, message in enumerate(sample.messages or ()):
        for part_number, part in enumerate(_media_parts(message)):
            where, kind = f"messages[{number}], media part {part_number}", part["type"]
            if not types:
                raise text_error(
                    sample,
                    f"{where} has type {kind!r}, but the rows have no column of items; accepted: "
                    "a column such as 'images' with the paths of a row's items, named by "
                    "data.modalities in a configuration",
                )
            if kind not in types:
                raise text_error(
                    sample,
                    f"{where} has type {kind!r}; accepted: {sorted(types)}. Add the column of the "
                    "items to the rows (such as 'images'), or, to accept another type, set "
                    "data.modalities.NAME.part",
                )
            media_keys = [k for k, v in part.items() if k not in ("type", "text") and v is not None]
            if media_keys:
                reason = f"{where} has {media_keys[0]!r}; media belong in a column of the row"
                raise text_error(sample, reason)
            counts[types[kind]] += 1
    for name in sorted(set(types.values())) if counts else ():
        items = len(sample.media.get(name, ()))
        if items != counts[name]:
            raise text_error(
                sample,
                f"the messages have {plural(counts[name], f'{name} part')}, but the row has "
                f"{plural(items, f'{name} item')}; accepted: a part for each item"
                + (". Does this row lack the column of the items?" if not items else ""),
            )


def flatten_parts(
    messages: Sequence[dict], types: Mapping[str, str], placeholders: Mapping[str, Placeholder]
) -> list[dict]:
    """Convert list content to strings: each media part becomes its placeholder, or nothing if the
    modality has none (its items are then merged elsewhere). ``types`` maps part types to
    modalities."""

    def text(part: dict) -> str:
        if part["type"] == "text":
            return part["text"]
        name = types[part["type"]]
        return placeholders[name].token if name in placeholders else ""

    return [
        {**message, "content": "".join(map(text, message["content"]))}
        if isinstance(message["content"], list) else message
        for message in messages
    ]


def template_takes_parts(tokenizer, kind: str, token: str) -> bool:
    """Return True if a chat template writes the placeholder ``token`` itself for a part of type
    ``kind``."""
    content = [{"type": kind}, {"type": "text", "text": _PROBE}]
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    except Exception:  # a template is a program: it may raise anything
        return False
    # A template that only supports strings would print the list.
    return _PROBE in text and "'type'" not in text and '"type"' not in text and token in text


def repeat_placeholders(
    tokens: Sequence[tuple[int, int]], placeholders: Mapping[str, Placeholder]
) -> list[tuple[int, int]]:
    """Repeat every placeholder in a list of (token, label) pairs as often as its item has tokens.
    """
    times = {
        placeholder.id: placeholder.repeat
        for placeholder in placeholders.values() if placeholder.repeat
    }
    return [pair for pair in tokens for _ in range(times.get(pair[0], 1))]


def check_counts(
    sample: Sample, input_ids: Sequence[int], kept: int, placeholders: Mapping[str, Placeholder]
) -> None:
    """Raise a ``SampleError`` if the placeholders of a sample do not match its items, or are
    truncated.

    Args:
        input_ids: all tokens, with placeholders repeated.
        kept: number of tokens within ``max_length``.
    """
    for name, placeholder in placeholders.items():
        items, tokens = len(sample.media.get(name, ())), list(input_ids).count(placeholder.id)
        count = tokens // (placeholder.repeat or 1)
        if placeholder.repeat and count != items or bool(tokens) != bool(items):
            raise text_error(
                sample,
                f"its text has {count} placeholders {placeholder.token!r} for {items} {name} "
                "items; the two must be equal" + ("" if placeholder.repeat else " or both 0"),
            )
        if tokens != list(input_ids[:kept]).count(placeholder.id):
            raise text_error(
                sample,
                f"max_length ({kept}) cuts off some of its {tokens} {name} tokens "
                f"({placeholder.token!r})",
            )


def _media_parts(message: dict) -> list[dict]:
    content = message["content"]
    return [part for part in content if part["type"] != "text"] if isinstance(content, list) else []


def text_error(sample: Sample, reason: str) -> SampleError:
    """Return an error about the text of a sample."""
    role = "messages" if sample.text is None else "text"
    column = sample.columns.get(role, role)
    return SampleError(reason, column, None, sample.id, sample.place or None)
