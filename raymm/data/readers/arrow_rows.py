"""Base class of readers of Arrow tables: rows and item counts, without creating Python objects for
media bytes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from raymm.data.readers.base import Reader
from raymm.data.readers.row_index import MEDIA_COLUMNS, ProgressReport, ReaderOptions, RowIndex
from raymm.data.remote.path import DataPath
from raymm.data.samples.headers import Limits
from raymm.data.samples.row_forms import FORMS, RENAME, accepted_columns
from raymm.errors import DataError, SampleError
from raymm.packages import is_import_path

# Roles whose value may be messages, and those that may have messages as a JSON string.
_MESSAGES = (
    "messages", "conversations", "prompt", "completion", "chosen", "rejected", "rejected_response",
    "rejected_messages",
)
_JSON_MESSAGES = ("messages", "conversations", "rejected_messages")


@dataclass(frozen=True)
class ColumnPlan:
    """Columns of an Arrow schema that are read.

    Attributes:
        used: all columns that are read, in the order of the schema.
        text: columns without media.
        media: media column -> modality; -> the column itself during a survey.
        scan: True if the text must be read for the index, because it may contain media or several
            row forms fit.
        frames: media columns with lists of lists.
        forms: row forms that the columns allow.
        unused: columns that nothing uses.
    """

    used: list[str]
    text: list[str]
    media: dict[str, str]
    frames: list[str]
    scan: bool
    forms: list[str]
    unused: list[str]


class ArrowReader(Reader):
    """Base class of readers of Arrow tables, in one or more parts of different columns."""

    checked_when_opened = False  # the text may not be read before a row is requested

    @abstractmethod
    def _opened_part(self, number: int) -> AbstractContextManager[Any]:
        """Open part ``number`` for indexing."""

    @abstractmethod
    def _batches(self, part: Any, number: int, columns: list[str]) -> Iterator[Any]:
        """Yield the rows of some columns of a part, as tables or record batches."""

    @abstractmethod
    def _media(self, part: Any, number: int, column: str) -> Iterator[Any]:
        """Yield the arrays of a media column; structs need not have ``bytes``."""

    def _index(
        self, parts: Sequence[tuple[DataPath, ColumnPlan, int]], report: ProgressReport
    ) -> None:
        """Index the parts, given as (path, plan, rows)."""

        def build() -> RowIndex:
            return self._build(parts, report)

        is_scanned = any(plan.scan for _, plan, _ in parts)
        self._use(self._stored(build) if is_scanned else build())
        for path, plan, _ in parts:
            for name in plan.unused:
                self.survey.unused.setdefault(name, str(path))

    def _build(
        self, parts: Sequence[tuple[DataPath, ColumnPlan, int]], report: ProgressReport
    ) -> RowIndex:
        """Count the items per row from the smallest sufficient columns, and read the text if it may
        contain media or determines the row form."""
        index = RowIndex(self.options)
        folders = self._media_folders(0)
        frames = {self.columns[name] for name in self.options.frames if name in self.columns}
        for number, (path, plan, rows) in enumerate(parts):
            with self._opened_part(number) as part:
                counts = {
                    modality: np.concatenate([np.zeros(0, np.int32), *(
                        count_column(values, column, column in frames)
                        for values in self._media(part, number, column)
                    )])
                    for column, modality in plan.media.items()
                }
                if self.options.survey:
                    index.survey.add_media(counts, plan.frames, str(path))
                if not plan.scan:
                    index.add_counts(counts, rows, plan.forms[0])
                    continue
                counts = {name: c for name, c in counts.items() if name in index.counts}
                offset = 0
                for table in self._batches(part, number, plan.text):
                    for row in table.to_pylist():
                        counted = {name: int(c[offset]) for name, c in counts.items()}
                        index.add(without_nulls(row), f"{path}[{offset}]", folders, counted)
                        offset += 1
                    report(len(index), len(index) / len(self))
        return index.finish()


def plan_columns(schema: Any, options: ReaderOptions, where: object) -> ColumnPlan:
    """Select the columns of a ``pyarrow.Schema`` to read; raise a ``DataError`` that names
    ``where`` (file or folder) if no row form fits."""
    ignored = options.ignore_columns or frozenset()
    present = [name for name in schema.names if name not in ignored]
    media = {column: modality for modality, column in options.columns.items()}
    if options.survey:
        media |= {name: name for name in present if name in MEDIA_COLUMNS}

    def column(role: str) -> str:
        return options.text_columns.get(role, role)

    configured = set(options.text_columns.values())
    texts = {name for name in present if name not in media or name in configured}
    if is_import_path(options.row_form):  # the function may read any column
        return ColumnPlan(
            present, [name for name in present if name in texts], media,
            [name for name in media if _is_nested(schema, name)], True, [], [],
        )
    names = list(FORMS) if options.row_form is None else [options.row_form]
    forms = [form for form in names if all(column(role) in texts for role in FORMS[form].required)]
    if not forms:
        raise DataError(
            f"{where} needs columns {accepted_columns(column, names)}; its columns are "
            f"{sorted(schema.names)}{RENAME}"
        )
    needed = set().union(*(options.form_columns(form) for form in forms))
    roles = {
        role for form in forms for role in (*FORMS[form].required, *FORMS[form].optional)
        if column(role) in texts
    }
    scan = options.survey or len(forms) > 1 or any(
        _may_hold_media(schema.field(column(role)).type, role) for role in roles
    )
    return ColumnPlan(
        [name for name in present if name in needed or name in media],
        [name for name in present if name in needed and name in texts],
        media, [name for name in media if _is_nested(schema, name)], scan, forms,
        [name for name in present if name not in needed and name not in media],
    )


def _is_nested(schema: Any, name: str) -> bool:
    kind = schema.field(name).type if name in schema.names else None
    return kind is not None and _is_list(kind) and _is_list(kind.value_type)


def _may_hold_media(kind: Any, role: str) -> bool:
    """Return True if a column of this type may contain media in parts of messages."""
    import pyarrow.types as types

    if role not in _MESSAGES:
        return False
    if _is_string(kind):
        return role in _JSON_MESSAGES
    while _is_list(kind):
        kind = kind.value_type
    if not types.is_struct(kind):
        return True
    contents = [
        kind.field(number).type for number in range(kind.num_fields)
        if kind.field(number).name in ("content", "value")
    ]
    return not contents or not all(
        _is_string(content) or _is_list(content) and _is_string(content.value_type)
        for content in contents
    )


def without_nulls(value: Any) -> Any:
    """Remove struct fields that are null because the row lacks them."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def count_column(values, column: str, frames: bool) -> np.ndarray:
    """Count the items in each row of a media column, (rows,) int32. See
    ``raymm.data.samples.row_media.items_of`` for accepted values. Raise a ``DataError`` if the type
    cannot contain media.

    Args:
        values: pyarrow array of strings, binaries, structs, or lists of them. Only lengths and
            nulls are read, so structs may lack ``bytes``.
        frames: True if a list is one item and a list of lists is several.
    """
    import pyarrow as pa
    from pyarrow import compute

    pc: Any = compute  # type checkers do not see its functions, which are created at import

    kind = values.type
    if _is_list(kind):
        lengths = pc.fill_null(pc.list_value_length(values), 0)
        if frames and not _is_list(kind.value_type):
            lengths = pc.greater(lengths, 0).cast(pa.int32())
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        lengths = pc.fill_null(pc.not_equal(values, ""), False).cast(pa.int32())
    elif pa.types.is_struct(kind) or _is_binary(kind) or pa.types.is_null(kind):
        lengths = pc.is_valid(values).cast(pa.int32())
    else:
        raise DataError(f"column {column!r} is of type {kind}, which holds no paths or bytes")
    return np.asarray(lengths.to_numpy(zero_copy_only=False), dtype=np.int32)


def row_of(table: Any, at: int, limits: Limits) -> dict:
    """Return the values of one row of a pyarrow table by column, without nulls. A value above
    ``max_item_bytes`` raises a ``SampleError`` before it is copied."""
    row = table.slice(at, 1)
    for name, values in zip(row.column_names, row.columns, strict=True):
        _check_lengths(values.combine_chunks(), name, limits.max_item_bytes)
    return without_nulls(row.to_pylist()[0])


def _check_lengths(values, column: str, limit: int) -> None:
    """Check the lengths of all binaries and strings in a column, at any depth."""
    import pyarrow as pa
    from pyarrow import compute

    pc: Any = compute  # type checkers do not see its functions, which are created at import

    if isinstance(values, pa.ChunkedArray):
        for chunk in values.chunks:
            _check_lengths(chunk, column, limit)
    elif _is_list(values.type):
        _check_lengths(values.flatten(), column, limit)
    elif pa.types.is_struct(values.type):
        for field in values.flatten():
            _check_lengths(field, column, limit)
    elif _is_binary(values.type) or _is_string(values.type):
        longest = pc.max(pc.binary_length(values)).as_py() or 0
        if longest > limit:
            raise SampleError(
                f"it has {longest:,} bytes, above data.max_item_bytes ({limit:,})", column
            )


def _is_list(kind) -> bool:
    import pyarrow.types as types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_binary(kind) -> bool:
    import pyarrow.types as types

    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def _is_string(kind) -> bool:
    import pyarrow.types as types

    return types.is_string(kind) or types.is_large_string(kind)
