"""Rows of a JSON or JSONL file, found by byte offset; nothing is kept parsed."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raymm.data.errors import DataError

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Sample:
    """One row. Exactly one of ``messages`` and ``text`` is set.

    Attributes:
        index: position in the file, from 0.
        id: the row's ``id``, or ``FILE:LINE`` (``FILE[INDEX]`` in a JSON array).
        messages: list of {"role": str, "content": str}.
        text: plain text to learn whole.
        media: modality -> absolute paths; a modality the sample lacks is absent.
    """

    index: int
    id: str
    messages: list[dict] | None
    text: str | None
    media: dict[str, tuple[str, ...]]


class JsonDataset:
    """Samples of a JSON array or JSONL file (recognised by a leading ``[``).

    Opening it reads the file once, checks every row and keeps per row its byte range and the
    number of items of each modality. Blank lines are ignored. Relative media paths are relative
    to the file's folder; the media themselves are not opened. Picklable, without the rows.

    Args:
        path: the file.
        columns: modality -> column of its paths (one path, a list, or null / "" / [] for none).

    Raises:
        DataError: no such file, no rows, a malformed row (names ``FILE:LINE``), or a column of
            ``columns`` that no row has.

    Attributes:
        counts: modality -> (N,) int32, items per sample.
    """

    def __init__(self, path: str | Path, columns: Mapping[str, str] | None = None):
        self.path = Path(path).resolve()
        self.columns = dict(columns or {})
        if not self.path.is_file():
            raise DataError(f"data file {str(path)!r} does not exist (looked for {self.path})")
        self._array = _is_array(self.path)
        self._build_index()

    def _build_index(self) -> None:
        ranges, places, seen = [], [], set()
        counts = {modality: [] for modality in self.columns}
        for start, stop, place, row in (_array_rows if self._array else _line_rows)(self.path):
            where = self._where(place)
            _check_row(row, where)
            seen.update(row)
            for modality, column in self.columns.items():
                counts[modality].append(len(_paths(row.get(column), column, where)))
            ranges.append((start, stop))
            places.append(place)
        if not ranges:
            raise DataError(f"data file {self.path} has no samples")
        for modality, column in self.columns.items():
            if column not in seen:
                raise DataError(
                    f"column {column!r} (modality {modality!r}) is in no row of {self.path}; "
                    f"its columns are {sorted(seen)}"
                )
        self._ranges = np.asarray(ranges, dtype=np.int64)
        self._places = np.asarray(places, dtype=np.int64)
        self.counts = {name: np.asarray(count, dtype=np.int32) for name, count in counts.items()}

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, index: int) -> Sample:
        """Read row ``index``; negative counts from the end.

        Raises:
            IndexError: out of range.
            DataError: the file changed since it was opened.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {self.path}, which has {len(self)}")
        index = int(index) % len(self)
        start, stop = self._ranges[index]
        where = self._where(self._places[index])
        try:
            with open(self.path, "rb") as file:
                file.seek(start)
                row = json.loads(file.read(stop - start))
            _check_row(row, where)
        except (OSError, ValueError, DataError) as error:
            raise DataError(f"{where} changed while the run was reading it: {error}") from error
        return self._sample(index, row, where)

    def _sample(self, index: int, row: dict, where: str) -> Sample:
        media = {}
        for modality, column in self.columns.items():
            paths = _paths(row.get(column), column, where)
            if paths:
                media[modality] = tuple(str(self.path.parent / path) for path in paths)
        sample_id = row.get("id")
        return Sample(
            index=index,
            id=where if sample_id is None else str(sample_id),
            messages=row.get("messages"),
            text=row.get("text"),
            media=media,
        )

    def _where(self, place: int) -> str:
        return f"{self.path}[{place}]" if self._array else f"{self.path}:{place}"


def _is_array(path: Path) -> bool:
    with open(path, "rb") as file:
        for line in file:
            line = line.removeprefix(_BOM).strip()
            if line:
                return line.startswith(b"[")
    return False


def _line_rows(path: Path) -> Iterator[tuple[int, int, int, object]]:
    """(first byte, end byte, line number from 1, parsed line) of every line that is not blank."""
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            start, stop = offset, offset + len(line)
            offset = stop
            if line.startswith(_BOM):
                start, line = start + len(_BOM), line[len(_BOM) :]
            if not line.strip():
                continue
            try:
                yield start, stop, number, json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number} is not a JSON value: {error}") from None


def _array_rows(path: Path) -> Iterator[tuple[int, int, int, object]]:
    """The same for a JSON array, numbered from 0. Holds the file's text while it runs."""
    content = path.read_bytes()
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
        except ValueError as error:
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


def _check_row(row: object, where: str) -> None:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a sample is a JSON object, got {type(row).__name__}")
    messages, text = row.get("messages"), row.get("text")
    if messages is None and text is None:
        raise DataError(f"{where}: a sample needs 'messages' or 'text'; it has {sorted(row)}")
    if messages is not None and text is not None:
        raise DataError(f"{where}: a sample has 'messages' or 'text', not both")
    if text is not None and not isinstance(text, str):
        raise DataError(f"{where}: 'text' must be a string, got {type(text).__name__}")
    if messages is not None:
        _check_messages(messages, where)


def _check_messages(messages: object, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: 'messages' must be a list with at least one message")
    for number, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                raise DataError(f"{where}: messages[{number}] needs a string {key!r}")


def _paths(value: object, column: str, where: str) -> tuple[str, ...]:
    if not value:
        return ()
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise DataError(f"{where}: column {column!r} must be a path or a list of paths")
    return tuple(paths)
