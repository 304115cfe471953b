"""Reader of JSON and JSON lines files. Rows are located by byte offset, and no parsed row is kept.
"""

from __future__ import annotations

import codecs
import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from raymm.data.readers.base import Reader
from raymm.data.readers.files import DESCRIPTIONS, find_files, plain_file
from raymm.data.readers.row_index import ProgressReport, RowIndex
from raymm.data.remote.path import SCAN_BLOCK, DataPath, open_data, read_range, size_of
from raymm.data.samples.folders import MediaFolders
from raymm.errors import DataError, SampleError

SUFFIXES = (".json", ".jsonl", ".ndjson")
_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\r\n\ufeff]*")
# Longest line, which is read at once; a file with longer lines is probably not JSON lines.
MAX_LINE_BYTES = 2**26


class JsonDataset(Reader):
    """Samples of JSON files: JSON lines, or arrays if the file begins with ``[``.

    The path is a file, a folder (all ``.json``, ``.jsonl`` and ``.ndjson`` files below it, by name)
    or a glob; files may be compressed (``.gz``, ``.zst``). Opening reads every file once, checks
    every row, and keeps the byte range and the number of items per modality of each row. Blank
    lines and byte order marks are ignored. Media paths are relative to the folder of their file;
    media files are not opened.
    """

    def _open(self, report: ProgressReport) -> None:
        files = find_files(self.path, SUFFIXES)
        if len(files) > 1:
            files = [file for file in files if file.name not in DESCRIPTIONS]
        self.files = files
        self._plain = [plain_file(file, lambda part: report(0, part)) for file in files]
        index = self._stored(lambda: self._build(report))
        self._ranges, self._places = index.arrays["ranges"], index.arrays["places"]
        self._arrays = index.arrays["arrays"]
        self._use(index)
        if not len(self._ranges):
            raise DataError(f"data file {self.path} has no samples")
        self._check_columns(set(self.survey.columns))

    def _build(self, report: ProgressReport) -> RowIndex:
        index = RowIndex(self.options)
        ranges, row_numbers, arrays = array("q"), array("q"), []
        total = max(sum(size_of(file) for file in self._plain), 1)
        bytes_read = 0
        for number, path in enumerate(self._plain):
            arrays.append(_is_array(path))
            folders = self._folders_of(number)
            rows = (_array_rows if arrays[-1] else _line_rows)(path, self.files[number])
            for start, stop, row_number, row in rows:
                index.add(row, self._where(number, row_number, arrays[-1]), folders)
                ranges.extend((number, start, stop))
                row_numbers.append(row_number)
                report(len(row_numbers), (bytes_read + stop) / total)
            bytes_read += size_of(path)
        return index.finish(
            ranges=np.asarray(ranges).reshape(-1, 3), places=np.asarray(row_numbers),
            arrays=np.asarray(arrays, np.bool_),
        )

    def __len__(self) -> int:
        return len(self._ranges)

    def _row(self, index: int) -> Any:
        number, start, stop = map(int, self._ranges[index])
        return json.loads(read_range(self._local(number), start, stop - start))

    def _local(self, number: int) -> DataPath:
        """Return the file to read rows from. A node without the decompressed copy creates one;
        raise a ``ValueError`` if the compressed file has changed since it was opened."""
        path = self._plain[number]
        if path != self.files[number] and not path.is_file():
            path = plain_file(self.files[number])
            if path.name != self._plain[number].name:
                raise ValueError("the compressed file has changed")
        return path

    def place(self, index: int) -> str:
        number = int(self._ranges[index, 0])
        return self._where(number, int(self._places[index]), bool(self._arrays[number]))

    def _where(self, number: int, place: int, array: bool) -> str:
        path = self.files[number]
        return f"{path}[{place}]" if array else f"{path}:{place}"

    def _media_folders(self, index: int) -> MediaFolders:
        return self._folders_of(int(self._ranges[index, 0]))

    def _folders_of(self, number: int) -> MediaFolders:
        """Return the folders of the media of a file: the folder of the file, and that of the
        source."""
        allowed = self.options.media_folders
        if isinstance(self.path, Path) and self.path.is_dir():
            allowed = (str(self.path), *allowed)
        return MediaFolders(self.files[number].parent, allowed)


def _is_array(path: DataPath) -> bool:
    with open_data(path) as file:
        while line := file.readline(MAX_LINE_BYTES):
            line = line.removeprefix(_BOM).strip()
            if line:
                return line.startswith(b"[")
    return False


def _line_rows(path: DataPath, name: DataPath) -> Iterator[tuple[int, int, int, object]]:
    """Yield (first byte, end byte, line number from 1, parsed line) for every line that is not
    blank. A line that is not JSON yields a ``SampleError`` instead of a parsed line."""
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
                yield start, stop, number, SampleError(reason)
                continue
            offset = stop
            while line.startswith(_BOM):
                start, line = start + len(_BOM), line[len(_BOM) :]
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                row = SampleError(f"the line is not JSON: {error}{_advice(line, number)}")
            yield start, stop, number, row


def _advice(line: bytes, number: int) -> str:
    """Return advice about a line that is not JSON."""
    line = line.strip()
    if line.startswith(b"{'"):
        return ". JSON has double quotes: write the row with json.dumps, not str"
    if number == 1 and line in (b"{", b"[{"):
        return ". An object over several lines: write each row on one line, or a JSON array of rows"
    if not line.startswith(b"{"):
        return ". Each line must be one JSON object, or the file a JSON array"
    return ". The line may be cut off, or its row may continue in the next line"


class _Window:
    """Text of a UTF-8 file, read in blocks, with the byte offset and line number of the current
    position."""

    def __init__(self, file: BinaryIO) -> None:
        self.text, self.at, self.byte, self.line = "", 0, 0, 1
        self._file, self._block, self._ended = file, SCAN_BLOCK, False
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def more(self) -> bool:
        """Read the next block and drop the text before the position; return False at the end."""
        if self._ended:
            return False
        data = self._file.read(self._block)
        self._ended = not data
        self.text, self.at = self.text[self.at :] + self._decode(data, not data), 0
        return True

    def move(self, stop: int) -> None:
        """Advance to a later position."""
        passed = self.text[self.at : stop]
        self.byte += len(passed.encode())
        self.line += passed.count("\n")
        self.at = stop

    def peek(self) -> str:
        """Return the next character that is not a space; an empty string at the end."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self.move(match.end() if match else self.at)
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def value(self, decoder: json.JSONDecoder) -> tuple[object, int]:
        """Parse the JSON value at the position; return it and its end. While the value is
        incomplete, more text is read, doubling the block size each time."""
        while True:
            try:
                value, stop = decoder.raw_decode(self.text, self.at)
                if stop < len(self.text) or not self.more():
                    self._block = SCAN_BLOCK
                    return value, stop
            except json.JSONDecodeError:
                if not self.more():
                    raise
            self._block *= 2


def _array_rows(path: DataPath, name: DataPath) -> Iterator[tuple[int, int, int, object]]:
    """Yield (first byte, end byte, index from 0, value) for the elements of a JSON array."""
    decoder = json.JSONDecoder()
    with open_data(path, SCAN_BLOCK) as file:
        window = _Window(file)
        try:
            yield from _elements(window, decoder, name)
        except UnicodeDecodeError as error:
            raise DataError(f"{name} is not UTF-8: {error}") from None


def _elements(
    window: _Window, decoder: json.JSONDecoder, name: DataPath
) -> Iterator[tuple[int, int, int, object]]:
    window.peek()
    window.move(window.at + 1)  # the bracket
    index = 0
    while window.peek() != "]":
        try:
            row, stop = window.value(decoder)
        except (ValueError, RecursionError) as error:
            if isinstance(error, UnicodeDecodeError | DataError):
                raise
            raise DataError(
                f"{name}:{window.line}: element {index} of the array is not a JSON value: {error}"
            ) from None
        start = window.byte
        window.move(stop)
        yield start, window.byte, index, row
        index += 1
        if (following := window.peek()) == ",":
            window.move(window.at + 1)
        elif following != "]":
            cause = "the file ends" if not following else f"{following!r} follows"
            raise DataError(
                f"{name}:{window.line}: expected ',' or ']' after element {index - 1}, but {cause}"
            )
    window.move(window.at + 1)
    if following := window.peek():
        raise DataError(
            f"{name}:{window.line}: {following!r} follows the end of the array; accepted: one "
            "array in a file. Join the arrays, or write each row on a separate line"
        )
