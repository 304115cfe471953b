"""Parsing of a row of any format: its text, its media, and unused columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from raymm.data.samples.folders import MediaFolders
from raymm.data.samples.headers import Limits
from raymm.data.samples.media import Media
from raymm.data.samples.messages import LEARNED_ROLE
from raymm.data.samples.row_forms import (
    ACCEPTED,
    FORMS,
    ID,
    TEXT,
    TEXT_ROLES,
    RoleValues,
    RowText,
    convert_row,
    find_form,
)
from raymm.data.samples.row_media import MediaRules, PartMedia, items_of
from raymm.errors import USER_CODE_RAISES, SampleError
from raymm.packages import is_import_path, user_function

__all__ = ["ID", "TEXT", "TEXT_ROLES", "LEARNED_ROLE", "ParsedRow", "RowRules", "parse_row"]


@dataclass(frozen=True)
class RowRules:
    """Rules for parsing the rows of a source.

    Attributes:
        columns: modality -> its column.
        parts: type of a message part -> modality, for media in messages.
        text_columns: role (``"messages"``, ``"prompt"``, ``"id"``, ...) -> column, for columns with
            other names.
        row_form: key of :data:`raymm.data.samples.row_forms.FORMS`; the import path of a function
            that converts rows; None to decide by the columns of a row.
        ignore_columns: columns that are not used on purpose; other unused columns are errors. None
            accepts all columns.
        frames: modalities whose items are lists of frames.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    text_columns: Mapping[str, str] = field(default_factory=dict)
    row_form: str | None = None
    ignore_columns: frozenset[str] | None = None
    frames: frozenset[str] = frozenset()
    limits: Limits = Limits()

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.columns, *self.parts.values()]))

    def form_columns(self, form: str) -> set[str]:
        roles = (*FORMS[form].required, *FORMS[form].optional, ID)
        return {self.text_columns.get(role, role) for role in roles}


@dataclass(frozen=True)
class ParsedRow:
    """Row with values in the form of :class:`raymm.data.samples.media.Sample`.

    Attributes:
        media: modality -> items; modalities without items are absent.
        inline: modalities whose items are in messages.
        used: columns with a value that the form or a modality uses.
        unused: columns with a value, and keys of message parts, that nothing uses.
    """

    form: str
    text: RowText
    media: dict[str, tuple[Media, ...]]
    inline: frozenset[str]
    used: frozenset[str]
    unused: frozenset[str]
    column: str


def parse_row(row: object, rules: RowRules, folders: MediaFolders, place: str = "") -> ParsedRow:
    """Parse a row. Raise a ``SampleError`` if the row is unusable, or names a path outside the
    folders.

    Args:
        folders: folders in which the row may name files.
        place: location of the row, part of the name of items without a path.
    """
    if not isinstance(row, dict):
        raise SampleError(f"a sample is a JSON object, got {type(row).__name__}")
    ignored = rules.ignore_columns or frozenset()
    if is_import_path(rules.row_form):
        row, rules = _converted(row, rules)
    values = RoleValues(row, rules.text_columns, ignored | set(rules.columns.values()))
    present = sorted(str(key) for key, value in row.items() if value is not None)
    form = find_form(values, rules.row_form, present)
    column = values.column(FORMS[form].main)
    media_rules = MediaRules(folders, rules.limits, place, rules.frames, rules.parts)
    part_media = PartMedia(media_rules, column)
    text = _without_media(convert_row(values, form), part_media, column)
    _check_characters(text, rules.limits.max_text_characters, column)
    media = {modality: tuple(items) for modality, items in part_media.items.items()}
    for modality, name in rules.columns.items():
        items = items_of(row.get(name), name, media_rules, modality in rules.frames)
        if items and modality in media:
            raise SampleError(
                f"the row has {modality} items in column {name!r} and in parts of its messages; "
                "accepted: one of them", name,
            )
        if items:
            media[modality] = items
    used = rules.form_columns(form) | set(rules.columns.values())
    names = {str(key) for key, value in row.items() if value not in (None, "", [], {})}
    unused = (names - used | part_media.unused) - ignored
    return ParsedRow(
        form, text, media, frozenset(part_media.items), frozenset(names & used), frozenset(unused),
        column,
    )


def _converted(row: dict, rules: RowRules) -> tuple[dict, RowRules]:
    """Return the row that a user's function makes of a row without its columns of media, with
    these columns; its own columns decide its form. Raise a ``SampleError`` for any other result."""
    media = {name: row[name] for name in rules.columns.values() if name in row}
    hidden = {*media, *(rules.ignore_columns or ())}
    where = f"data.row_form {rules.row_form!r}"
    function = user_function("data.row_form", rules.row_form, ACCEPTED)
    try:
        result = function({name: value for name, value in row.items() if name not in hidden})
    except USER_CODE_RAISES as error:
        raise SampleError(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(result, dict):
        raise SampleError(f"{where} returned {type(result).__name__}; accepted: a dict")
    if both := sorted({*rules.columns.values()} & result.keys()):
        raise SampleError(
            f"{where} returned {both[0]!r}, which data.modalities reads from the row; accepted: "
            "columns of text"
        )
    return {**result, **media}, replace(rules, row_form=None)


def _without_media(text: RowText, parts: PartMedia, column: str) -> RowText:
    """Move media from message parts to ``parts``."""
    if text.messages is None:
        return text
    if text.preference is None:
        return replace(text, messages=parts.take(text.messages))
    pair = text.preference
    prompt = parts.take(pair.prompt)
    prompt_items = {modality: len(items) for modality, items in parts.items.items()}
    pair = replace(
        pair, prompt=prompt, chosen=parts.take(pair.chosen), rejected=parts.take(pair.rejected)
    )
    if prompt_items != {modality: len(items) for modality, items in parts.items.items()}:
        raise SampleError("an answer has media; accepted: media in the prompt", column)
    return replace(text, messages=pair.answers[0], preference=pair)


def _check_characters(text: RowText, most: int, column: str) -> None:
    """Raise a ``SampleError`` if the texts of the row are longer than ``most`` characters in total.
    """
    pair = text.preference
    texts = text.text, text.messages, text.tools, pair and pair.rejected
    if (characters := _characters(texts)) > most:
        raise SampleError(
            f"its text has {characters:,} characters, above data.max_text_characters ({most:,})",
            column,
        )


def _characters(value: object) -> int:
    """Count the characters of all texts in nested lists and objects."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0
