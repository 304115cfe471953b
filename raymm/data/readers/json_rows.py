"""Rows of a JSON or JSONL file, found by byte offset; nothing is kept parsed."""

import json
from collections.abc import Iterator

import numpy as np

from raymm.data.readers.base import Reader
from raymm.data.remote.path import SCAN_BLOCK, DataPath, open_data, read_range
from raymm.data.samples.errors import DataError, RowError

_BOM = b"\xef\xbb\xbf"
# A line is read whole: one above this is no row, but a file that is not JSONL.
MAX_LINE_BYTES = 2**26


class JsonDataset(Reader):
    """Samples of a JSON array or JSONL file (recognised by a leading ``[``).

    Opening it reads the file once, checks every row and keeps per row its byte range and the
    number of items of each modality. Blank lines are ignored. Relative media paths are relative
    to the file's folder; the media themselves are not opened.
    """

    def _open(self) -> None:
        if not self.path.is_file():
            raise DataError(f"data file {str(self.path)!r} does not exist")
        self._array = _is_array(self.path)
        ranges, places, seen = [], [], set()
        counts = {modality: [] for modality in self.columns}
        for start, stop, place, row in (_array_rows if self._array else _line_rows)(self.path):
            row_counts = self._checked_counts(self._where(place), len(ranges), row)
            for modality, count in row_counts.items():
                counts[modality].append(count)
            if isinstance(row, dict):
                seen.update(row)
            ranges.append((start, stop))
            places.append(place)
        if not ranges:
            raise DataError(f"data file {self.path} has no samples")
        self._check_columns(seen)
        self._ranges = np.asarray(ranges, dtype=np.int64)
        self._places = np.asarray(places, dtype=np.int64)
        self.counts = {name: np.asarray(count, dtype=np.int32) for name, count in counts.items()}

    def __len__(self) -> int:
        return len(self._ranges)

    def _row(self, index: int) -> dict:
        start, stop = self._ranges[index]
        return json.loads(read_range(self.path, int(start), int(stop - start)))

    def place(self, index: int) -> str:
        return self._where(self._places[index])

    def _where(self, place: int) -> str:
        return f"{self.path}[{place}]" if self._array else f"{self.path}:{place}"


def _is_array(path: DataPath) -> bool:
    with open_data(path) as file:
        while line := file.readline(MAX_LINE_BYTES):
            line = line.removeprefix(_BOM).strip()
            if line:
                return line.startswith(b"[")
    return False


def _line_rows(path: DataPath) -> Iterator[tuple[int, int, int, object]]:
    """(first byte, end byte, line number from 1, parsed line) of every line that is not blank;
    a ``RowError`` in place of a line that is not JSON."""
    offset = number = 0
    with open_data(path, SCAN_BLOCK) as file:
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            start, stop = offset, offset + len(line)
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
                    stop += len(line)
                offset = stop
                reason = f"a line of {stop - start:,} bytes, above {MAX_LINE_BYTES:,}"
                yield start, stop, number, RowError(reason)
                continue
            offset = stop
            if line.startswith(_BOM):
                start, line = start + len(_BOM), line[len(_BOM) :]
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                row = RowError(f"is not a JSON value: {error}")
            yield start, stop, number, row


def _array_rows(path: DataPath) -> Iterator[tuple[int, int, int, object]]:
    """The same for a JSON array, numbered from 0. Holds the file's text while it runs."""
    with open_data(path) as file:
        content = file.read()
    try:
        text = content.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}") from None
    decoder = json.JSONDecoder()
    byte, last = (len(_BOM) if content.startswith(_BOM) else 0), 0  # byte offset of text[last]
    at = _skip_space(text, _skip_space(text, 0) + 1)
    index = 0
    while text[at : at + 1] != "]":
        try:
            row, stop = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: element {index} is not a JSON value: {error}") from None
        byte += len(text[last:at].encode())
        last = at
        yield byte, byte + len(text[at:stop].encode()), index, row
        index += 1
        at = _skip_space(text, stop)
        if text[at : at + 1] == ",":
            at = _skip_space(text, at + 1)
        elif text[at : at + 1] != "]":
            line = text.count("\n", 0, at) + 1
            raise DataError(f"{path}:{line}: expected ',' or ']' after element {index - 1}")


def _skip_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at
