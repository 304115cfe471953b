"""Rows and item counts of Arrow columns, without making Python objects of media bytes."""

from typing import Any

import numpy as np

from raymm.data.samples.errors import DataError, RowError
from raymm.data.samples.limits import Limits


def count_column(values, column: str, frames: bool) -> np.ndarray:
    """(rows,) int32 items of a media column; see ``raymm.data.samples.rows.items_of`` for what
    counts.

    Args:
        values: pyarrow array of strings, binaries, structs, or lists of them. Only lengths and
            nulls are read, so a struct may lack its ``bytes``.
        column: its name, for errors.
        frames: a list is one item, a list of lists several.

    Raises:
        DataError: the type holds no media.
    """
    import pyarrow as pa
    from pyarrow import compute

    pc: Any = compute  # type checkers do not see its functions, which are made at import

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


def row_of(table, at: int, limits: Limits) -> dict:
    """Column -> value of one row of a pyarrow table.

    Args:
        table: of pyarrow.
        at: the row's number.
        limits: of sizes.

    Raises:
        RowError: a value above ``max_item_bytes``; nothing is copied then.
    """
    row = table.slice(at, 1)
    for name, values in zip(row.column_names, row.columns, strict=True):
        _check_lengths(values.combine_chunks(), name, limits.max_item_bytes)
    return row.to_pylist()[0]


def _check_lengths(values, column: str, limit: int) -> None:
    """Lengths of all binaries and strings in a column, however deep."""
    import pyarrow as pa
    from pyarrow import compute

    pc: Any = compute  # type checkers do not see its functions, which are made at import

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
            raise RowError(
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
