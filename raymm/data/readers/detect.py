"""What a file or folder of rows holds: row forms, media columns, tools, unused columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raymm.data.readers import format_of, open_source
from raymm.data.readers.base import ReaderOptions

# Columns in which rows have media, by kind.
MEDIA_COLUMNS = {
    "image": ("images", "image"), "video": ("videos", "video"), "audio": ("audios", "audio"),
}
_FORMS = {
    "messages": ("messages",), "conversations": ("conversations",),
    "preference": ("chosen", "rejected"), "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"), "query_response": ("query", "response"),
    "text": ("text",),
}
# Called with the rows read so far and the fraction of the data that they are.
Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Detected:
    """Description of all rows of one source.

    Attributes:
        path: file, folder, glob, URL or data set name.
        format: ``"json"``, ``"parquet"``, ``"tar"``, ``"datasets"`` or ``"hub"``.
        rows: number of rows.
        forms: row form -> number of rows, the most frequent form first.
        modalities: kind (``image``, ``video``, ``audio``) -> column that holds its items, or None
            if all items are in message parts.
        items: kind -> number of items in all rows.
        preferences: number of rows with a chosen and a rejected answer.
        tools: number of rows with ``tools``.
        template: number of rows with ``chat_template_kwargs``.
        unused: columns that no row form and no modality uses.
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
    unused: tuple[str, ...] = ()

    @property
    def data_section(self) -> dict[str, Any]:
        """Values of the ``data:`` section of a configuration: ``train``, ``modalities`` and, if
        there are unused columns, ``ignore_columns``."""
        values: dict[str, Any] = {
            "train": self.path,
            "modalities": {
                kind: {} if column is None else {"column": column}
                for kind, column in self.modalities.items()
            },
        }
        return values | ({"ignore_columns": list(self.unused)} if self.unused else {})

    @property
    def summary(self) -> str:
        """One line for the terminal."""
        parts = [
            f"{self.rows:,} rows ("
            + ", ".join(f"{form} {count:,}" for form, count in self.forms.items()) + ")"
        ]
        parts += [
            f"{self.items[kind]:,} {kind} items "
            + ("in messages" if column is None else f"in column {column!r}")
            for kind, column in self.modalities.items()
        ]
        parts += [f"{self.tools:,} rows with tools"] if self.tools else []
        parts += [f"not used: {', '.join(self.unused)}"] if self.unused else []
        return "; ".join(parts)


def detect(
    path: str | Path, format: str | None = None, options: ReaderOptions | None = None,
    progress: Progress | None = None,
) -> Detected:
    """Read all rows of a source once and describe them.

    Args:
        path: file, folder, glob, URL or ``hf://datasets/ORG/NAME``.
        format: as of ``SourceConfig``; by the name if None.
        options: ``text_columns``, ``media_folders`` and the like; its ``columns`` are ignored.
        progress: called about once a second.

    Raises:
        DataError: no such file, or a row that cannot be used, with its line.
    """
    format = format or format_of(path)
    reader = open_source(path, format, options)
    forms: Counter = Counter()
    items: Counter = Counter()
    unused: dict[str, None] = {}
    modalities: dict[str, str | None] = {}
    tools = template = preferences = 0
    kinds = {column: kind for kind, columns in MEDIA_COLUMNS.items() for column in columns}
    for index in range(len(reader)):
        row = {key: value for key, value in reader._row(index).items() if value is not None}
        form = next((name for name, keys in _FORMS.items() if set(keys) <= set(row)), "unknown")
        forms[form] += 1
        preferences += form == "preference"
        tools += "tools" in row
        template += "chat_template_kwargs" in row
        for key, value in row.items():
            if key in kinds:
                modalities[kinds[key]] = key
                items[kinds[key]] += len(value) if isinstance(value, list) else 1
            elif key not in (*_FORMS.get(form, ()), "id", "tools", "chat_template_kwargs"):
                unused[key] = None
    if progress is not None:
        progress(len(reader), 1.0)
    return Detected(
        str(path), format, len(reader), dict(forms.most_common()), modalities, dict(items),
        preferences, tools, template, tuple(unused),
    )
