"""Reader of Parquet files. Reading a row loads its row group."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from raymm.data.readers.arrow_rows import ArrowReader, plan_columns, row_of
from raymm.data.readers.files import find_files
from raymm.data.readers.row_index import ProgressReport
from raymm.data.remote.path import DataPath
from raymm.errors import DataError, SampleError
from raymm.packages import require

# Most row groups kept in memory; together they are limited by ``max_row_group_bytes``.
_GROUPS_KEPT = 4
# Most rows decoded at a time.
_BATCH_ROWS = 256


class ParquetDataset(ArrowReader):
    """Samples of one Parquet file, a folder of them, or a glob, in the order of their names.

    Opening reads the metadata and the lengths of media columns (only the paths of {"bytes",
    "path"}), and the text if it may contain media or determines the row form. Reading a row loads
    the used columns of its row group and keeps the last few groups. Random access is fast for files
    with small row groups (100 rows, as ``datasets`` writes media). Needs pyarrow.

    Raises:
        DataError: also for a row group whose used columns exceed ``max_row_group_bytes``, before it
            is read.
    """

    def _open(self, report: ProgressReport) -> None:
        self.files = find_files(self.path, (".parquet",))
        self._groups: list[tuple[int, int]] = []
        self._batch_rows: list[int] = []
        self._used: list[list[str]] = []  # columns to read, by file
        parts, starts = [], [0]
        for number, path in enumerate(self.files):
            with _read(path) as file:
                plan = plan_columns(file.schema_arrow, self.options, path)
                self._check_columns(set(file.schema_arrow.names))
                parts.append((path, plan, file.metadata.num_rows))
                self._used.append(plan.used)
                for group in range(file.num_row_groups):
                    size = self._checked_size(file.metadata.row_group(group), path, group)
                    self._groups.append((number, group))
                    # With dictionary encoding, a value may be far larger than its share of the size
                    # in the metadata, but at most the entire size. This many rows therefore stay
                    # below the limit.
                    rows = self.options.limits.max_row_group_bytes // max(size, 1)
                    self._batch_rows.append(min(max(rows, 1), _BATCH_ROWS))
                    starts.append(starts[-1] + file.metadata.row_group(group).num_rows)
        self._starts = np.asarray(starts, dtype=np.int64)
        if not len(self):
            raise DataError(f"data file {self.path} has no samples")
        self._index(parts, report)
        self._kept: OrderedDict = OrderedDict()
        self._refused: dict[int, str] = {}  # row groups that are too large, and why

    def _opened_part(self, number: int) -> AbstractContextManager[Any]:
        return _read(self.files[number])

    def _batches(self, part: Any, number: int, columns: list[str]) -> Iterator[Any]:
        for (owner, group), rows in zip(self._groups, self._batch_rows, strict=True):
            if owner == number:
                yield from part.iter_batches(rows, [group], columns)

    def _checked_size(self, group, path: DataPath, number: int) -> int:
        """Return the bytes of the used columns of a row group; raise a ``DataError`` above the
        limit."""
        sizes: dict[str, int] = {}
        for column in range(group.num_columns):
            chunk = group.column(column)
            name = chunk.path_in_schema.split(".")[0]
            if name in self._used[-1]:
                sizes[name] = sizes.get(name, 0) + chunk.total_uncompressed_size
        limit = self.options.limits.max_row_group_bytes
        if sum(sizes.values()) > limit:
            largest = max(sizes, key=sizes.__getitem__)
            raise DataError(
                f"{path}: row group {number} has {sum(sizes.values()):,} bytes in the columns "
                f"{list(sizes)} (column {largest!r} {sizes[largest]:,}), above "
                f"data.max_row_group_bytes ({limit:,}); write the file with fewer rows per group"
            )
        return sum(sizes.values())

    def _media(self, part: Any, number: int, column: str) -> Iterator[Any]:
        leaves = [part.schema.column(leaf).path for leaf in range(len(part.schema))]
        paths = [
            leaf for leaf in leaves if leaf.split(".")[0] == column and leaf.endswith(".path")
        ]
        for batch in self._batches(part, number, paths or [column]):
            yield batch.column(0)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _locate(self, index: int) -> tuple[int, int]:
        """Return (row group, row in the group)."""
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        return group, int(index - self._starts[group])

    def place(self, index: int) -> str:
        file = self._groups[self._locate(index)[0]][0]
        first = next(n for n, (number, _) in enumerate(self._groups) if number == file)
        return f"{self.files[file]}[{index - self._starts[first]}]"

    @property
    def folder(self) -> DataPath:
        return self.files[0].parent

    def _row(self, index: int) -> dict:
        group, offset = self._locate(index)
        if group in self._refused:
            raise SampleError(self._refused[group])
        if group not in self._kept:
            try:
                self._keep(group)
            except SampleError as error:
                self._refused[group] = error.reason
                raise
        self._kept.move_to_end(group)
        return row_of(self._kept[group], offset, self.options.limits)

    def _keep(self, group: int) -> None:
        table = self._load(group)
        limit = self.options.limits.max_row_group_bytes - table.nbytes
        while self._kept and (
            len(self._kept) >= _GROUPS_KEPT or sum(t.nbytes for t in self._kept.values()) > limit
        ):
            self._kept.popitem(last=False)
        self._kept[group] = table

    def _load(self, group: int):
        import pyarrow as pa

        number, row_group = self._groups[group]
        limit, size, batches = self.options.limits.max_row_group_bytes, 0, []
        with _opened(self.files[number]) as file:
            rows = self._batch_rows[group]
            for batch in file.iter_batches(rows, [row_group], self._used[number]):
                size += batch.nbytes
                if size > limit:
                    raise SampleError(
                        f"row group {row_group} has more than {limit:,} bytes when decoded "
                        "(data.max_row_group_bytes)"
                    )
                batches.append(batch)
        return pa.Table.from_batches(batches)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_kept": OrderedDict()}


@contextmanager
def _read(path: DataPath) -> Iterator[Any]:
    """Open a ``pyarrow.parquet.ParquetFile`` for indexing; errors of pyarrow become a
    ``DataError``."""
    try:
        with _opened(path) as file:
            yield file
    except DataError:
        raise
    except (OSError, ValueError) as error:  # base classes of the errors of pyarrow
        raise DataError(f"{path} cannot be read as Parquet: {error}") from None


@contextmanager
def _opened(path: DataPath) -> Iterator[Any]:
    """Open a ``pyarrow.parquet.ParquetFile``, which reads only the requested parts."""
    require("pyarrow", "parquet", "a Parquet file")
    import pyarrow.parquet as parquet

    if isinstance(path, Path):
        with parquet.ParquetFile(path) as file:
            yield file
    else:
        with path.open(block=0) as source, parquet.ParquetFile(source) as file:
            yield file
