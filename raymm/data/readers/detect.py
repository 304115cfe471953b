"""Description of a file or folder of rows: row forms, media columns, tools, unused columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raymm.data.readers import format_of, open_source
from raymm.data.readers.base import Reader, ReaderOptions
from raymm.data.readers.row_index import MEDIA_COLUMNS, MEDIA_SUFFIXES, Progress
from raymm.errors import DataError
from raymm.plural import plural

# Kinds of media, and the types of message parts that hold them.
_PARTS = {"image": "image", "video": "video", "audio": "audio"}

@dataclass(frozen=True)
class Detected:
    """Description of all rows of one source.

    Attributes:
        format: ``"json"``, ``"parquet"``, ``"tar"``, ``"datasets"`` or ``"hub"``.
        forms: row form -> number of rows, the most frequent form first.
        modalities: kind (``image``, ``video``, ``audio``) -> column of its items, or None if all
            items are in message parts.
        items: kind -> number of items in all rows.
        preferences: number of rows with a chosen and a rejected answer.
        tools, template: number of rows with ``tools``, with ``chat_template_kwargs``.
        frames: kinds whose items are lists of frames.
        unused: columns, and keys of message parts, that no row form and no modality uses.
        names_media: unused column whose values name media files -> their kind.
    """

    path: str
    format: str
    rows: int
    forms: Mapping[str, int]
    modalities: Mapping[str, str | None] = field(default_factory=dict)
    items: Mapping[str, int] = field(default_factory=dict)
    preferences: int = 0
    tools: int = 0
    template: int = 0
    frames: frozenset[str] = frozenset()
    unused: tuple[str, ...] = ()
    names_media: Mapping[str, str] = field(default_factory=dict)

    @property
    def data_section(self) -> dict[str, Any]:
        """Values of the ``data:`` section of a configuration: ``train``, ``modalities`` and, for
        unused columns, ``ignore_columns``."""
        values: dict[str, Any] = {
            "train": self.path,
            "modalities": {
                kind: ({} if column is None else {"column": column})
                | ({"frames": True} if kind in self.frames else {})
                for kind, column in self.modalities.items()
            },
        }
        return values | ({"ignore_columns": list(self.unused)} if self.unused else {})

    @property
    def summary(self) -> str:
        """Summary in one line for the terminal."""
        forms = list(self.forms)
        counts = ", ".join(f"{count:,} of {form}" for form, count in self.forms.items())
        phrases = [
            plural(self.rows, "row")
            + (f" of the form {forms[0]}" if len(forms) == 1 else f" ({counts})")
        ]
        phrases += [
            plural(self.items[kind], f"{kind} item")
            + (" in messages" if column is None else f" in column {column!r}")
            for kind, column in self.modalities.items()
        ]
        phrases += [f"{plural(self.tools, 'row')} with tools"] if self.tools else []
        names = [
            f"{name} (names {self.names_media[name]} files; to use it, call the column "
            f"{self.names_media[name]!r} or name it in data.modalities)"
            if name in self.names_media else name for name in self.unused
        ]
        phrases += [f"not used: {', '.join(names)}"] if names else []
        return "; ".join(phrases)


def detect(
    path: str | Path, format: str | None = None, options: ReaderOptions | None = None,
    progress: Progress | None = None,
) -> Detected:
    """Read all rows of a source once and describe them. Raise a ``DataError`` if the file does not
    exist, or a row is unusable; names its line.

    Args:
        path: file, folder, glob, URL or ``hf://datasets/ORG/NAME``.
        format: a format of ``SourceConfig``; determined from the name if None.
        options: ``text_columns``, ``media_folders`` and similar; its ``columns`` are ignored.
    """
    format = format or format_of(path)
    options = replace(options or ReaderOptions(), columns={}, parts=_PARTS, survey=True)
    reader = open_source(path, format, options, progress)
    survey = reader.survey
    columns = _media_columns(reader) if format != "tar" else _members(reader)
    for kind in survey.inline:
        columns.setdefault(kind, None)
    ignored = options.ignore_columns or frozenset()
    items = Counter(survey.inline)
    for name, count in survey.media.items():
        if kind := _kind(name):
            items[kind] += count
    unused = tuple(
        name for name in survey.unused
        if name not in ignored and not (survey.media[name] and _kind(name))
    )
    for name in unused:
        if name in survey.used:
            raise DataError(
                f"column {name!r} is used by some rows ({survey.used[name]}) and not by others "
                f"({survey.unused[name]}), which have another row form; accepted: columns with one "
                "meaning in all rows. Remove the column there, split the file, or set data.row_form"
            )
    return Detected(
        str(path), format, len(reader), dict(survey.forms.most_common()),
        {kind: columns[kind] for kind in _PARTS if kind in columns},
        {kind: items[kind] for kind in _PARTS if kind in columns}, survey.preferences,
        survey.tools, survey.template,
        frozenset(MEDIA_COLUMNS[name] for name in survey.frames),
        unused, {name: kind for name, kind in survey.names_media.items() if name in unused},
    )


def _media_columns(reader: Reader) -> dict[str, str | None]:
    """Return the column of the items of each kind; raise a ``DataError`` if two columns have a
    kind."""
    columns: dict[str, str | None] = {}
    for name, count in reader.survey.media.items():
        kind = MEDIA_COLUMNS[name]
        if count and kind in columns:
            raise DataError(
                f"{reader.path} has items of kind {kind!r} in the columns {columns[kind]!r} and "
                f"{name!r}; accepted: one column. Rename one, or list it in data.ignore_columns"
            )
        if count:
            columns[kind] = name
    return columns


def _members(reader: Reader) -> dict[str, str | None]:
    """Return, by kind, the extensions of tar shard members that contain its items."""
    columns: dict[str, str | None] = {}
    for name in sorted(reader.survey.media):
        if kind := _kind(name):
            pattern = name if "." not in name else f"*.{name.rpartition('.')[2]}"
            earlier = columns.get(kind)
            names = [*(earlier.split(";") if earlier else ()), pattern]
            columns[kind] = ";".join(dict.fromkeys(names))
    return columns


def _kind(name: str) -> str | None:
    """Return the kind of the items of a column, or of a tar extension such as ``0.png``."""
    return MEDIA_COLUMNS.get(name) or MEDIA_SUFFIXES.get(name.rpartition(".")[2].lower())
