"""Index of the rows of a source, built in one pass: items per row, unusable rows, and a summary."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import zipfile
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from raymm.data.readers.files import cache_folder, written_file
from raymm.data.remote.path import DataPath, size_of, version_of
from raymm.data.samples.folders import MediaFolders
from raymm.data.samples.media import MediaRange
from raymm.data.samples.row_media import LONGEST_PATH, MediaRules, items_of
from raymm.data.samples.rows import ParsedRow, RowRules, parse_row
from raymm.errors import DataError, SampleError


@dataclass(frozen=True)
class ReaderOptions(RowRules):
    """Options of a reader.

    Attributes:
        media_folders: folders in which rows may name files, in addition to the folder of the
            source.
        subset, split, revision: of a hub dataset
            (:class:`raymm.data.readers.datasets_folder.HubDataset`).
        skip: keep unusable rows, and raise only when they are read.
        survey: read all rows while opening, and detect media in the usual columns
            (:mod:`raymm.data.readers.detect`).
    """

    name: str = ""
    media_folders: tuple[str, ...] = ()
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    skip: bool = False
    survey: bool = False


# Usual names of media columns -> kind.
MEDIA_COLUMNS = {
    "images": "image", "image": "image", "videos": "video", "video": "video", "audios": "audio",
    "audio": "audio",
}
# Suffixes of media files, and extensions of tar members -> kind.
MEDIA_SUFFIXES = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"), "image"),
    **dict.fromkeys(("mp4", "mkv", "webm", "mov", "avi"), "video"),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "opus", "m4a"), "audio"),
}
# Called with the number of rows read so far and their fraction of the data.
Progress = Callable[[int, float], None]
# The index of a source of at least this many bytes is stored on disk.
LARGE_SOURCE = 2**26
_REPORT_SECONDS, _LOG_SECONDS = 1.0, 10.0
_VERSION = 2
_COUNTS, _ARRAYS = "counts/", "arrays/"
_LOGGER = logging.getLogger(__name__)


class ProgressReport:
    """Reporter of the progress of reading ``what``: calls ``progress`` about once per second, or
    logs every ten seconds without such a function."""

    def __init__(self, what: object, progress: Progress | None = None) -> None:
        self._what, self._progress = what, progress
        self._interval = _LOG_SECONDS if progress is None else _REPORT_SECONDS
        self._last = time.monotonic()

    def __call__(self, rows: int, fraction: float) -> None:
        """Report the rows read so far, and the fraction of the source, 0 to 1."""
        now = time.monotonic()
        if now - self._last < self._interval:
            return
        self._last = now
        if self._progress is not None:
            self._progress(rows, min(fraction, 1.0))
        else:
            _LOGGER.info("reading %s: %d rows, %.0f %%", self._what, rows, 100 * fraction)


@dataclass
class Survey:
    """Summary of rows.

    Attributes:
        forms: row form -> rows.
        media: column of :data:`MEDIA_COLUMNS`, or extension of tar members -> items.
        frames: media columns with lists of lists.
        inline: modality -> items in messages.
        unused: columns that nothing uses -> first row with the column.
        used: columns that rows use -> first row with the column.
        names_media: unused column whose value in that first row names media files -> kind.
        tools, template, preferences: rows with tools, template arguments, two answers.
    """

    forms: Counter = field(default_factory=Counter)
    columns: dict[str, None] = field(default_factory=dict)
    media: Counter = field(default_factory=Counter)
    frames: dict[str, None] = field(default_factory=dict)
    inline: Counter = field(default_factory=Counter)
    unused: dict[str, str] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)
    names_media: dict[str, str] = field(default_factory=dict)
    tools: int = 0
    template: int = 0
    preferences: int = 0

    def add_media(
        self, counts: Mapping[str, np.ndarray], frames: Sequence[str], place: str
    ) -> None:
        """Add the (rows,) items of media columns of the file ``place``; ``frames`` are columns with
        lists of lists."""
        for column, values in counts.items():
            if not values.any():
                self.unused.setdefault(column, place)
            else:
                self.media[column] += int(values.sum())
                self.frames |= dict.fromkeys([column] if column in frames else [])

    def add(self, parsed: ParsedRow, place: str, row: Mapping[str, Any]) -> None:
        """Add a row; ``row`` maps columns to the values that ``parsed`` was made from."""
        self.forms[parsed.form] += 1
        self.tools += parsed.text.tools is not None
        self.template += bool(parsed.text.template)
        self.preferences += parsed.text.preference is not None
        for modality in parsed.inline:
            self.inline[modality] += len(parsed.media[modality])
        for name in parsed.used - self.used.keys():
            self.used[name] = place
        for name in parsed.unused:
            if name not in self.unused:
                self.unused[name] = place
                if kind := _named_kind(row.get(name)):
                    self.names_media[name] = kind


class RowIndex:
    """Index of the rows of a source.

    Attributes:
        counts: modality -> (rows,) int32 once finished.
        bad: row -> reason why the row is unusable.
    """

    def __init__(self, options: ReaderOptions) -> None:
        self._rules = options
        self.counts: dict[str, Any] = {name: array("i") for name in options.modalities}
        self.bad: dict[int, SampleError] = {}
        self.survey = Survey()
        self.arrays: dict[str, np.ndarray] = {}
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(
        self, row: Any, place: str, folders: MediaFolders, counted: Mapping[str, int] | None = None
    ) -> None:
        """Parse the next row and count its items; raise a ``DataError`` for an unusable row, unless
        such rows are kept.

        Args:
            row: column -> value, or the ``SampleError`` of a row that cannot be read.
            counted: items of media columns by modality, if ``row`` only has the other columns.
        """
        counts = dict.fromkeys(self.counts, 0)
        try:
            counts |= self._counted(row, place, folders, counted)
        except SampleError as error:
            if not self._rules.skip:
                where = f", file {error.path}" if error.path else ""
                raise DataError(f"{place}{where}: {error.reason}") from None
            self.bad[self._rows] = error
        for modality, count in counts.items():
            self.counts[modality].append(count)
        self._rows += 1

    def _counted(
        self, row: Any, place: str, folders: MediaFolders, counted: Mapping[str, int] | None
    ) -> dict[str, int]:
        if isinstance(row, SampleError):
            raise row
        rules = self._rules if counted is None else replace(self._rules, columns={})
        parsed = parse_row(row, rules, folders, place)
        if counted is None:
            self.survey.columns.update(dict.fromkeys(row))
            if self._rules.survey:
                self._add_media(row, MediaRules(folders, rules.limits))
        counts = {modality: len(items) for modality, items in parsed.media.items()}
        for modality, count in (counted or {}).items():
            if count and counts.get(modality):
                raise SampleError(
                    f"the row has {modality} items in column {self._rules.columns[modality]!r} and "
                    "in parts of its messages; accepted: one of them"
                )
            counts[modality] = counts.get(modality, 0) + count
        self.survey.add(parsed, place, row)
        return counts

    def _add_media(self, row: dict, rules: MediaRules) -> None:
        for column in set(MEDIA_COLUMNS) - (self._rules.ignore_columns or frozenset()):
            value = row.get(column)
            frames = bool(value) and isinstance(value, list) and all(
                isinstance(item, list) for item in value
            )
            count = len(items_of(value, column, rules, frames))
            if count:
                self.survey.media[column] += count
            if frames:
                self.survey.frames[column] = None
        self.survey.media.update(
            name for name, value in row.items() if isinstance(value, MediaRange)
        )

    def add_counts(self, counts: Mapping[str, np.ndarray], rows: int, form: str) -> None:
        """Add ``rows`` rows of a form whose text is not read, with (rows,) item counts by modality.
        """
        for modality, values in self.counts.items():
            values.extend(counts.get(modality, np.zeros(rows, np.int32)).tolist())
        self.survey.forms[form] += rows
        self._rows += rows

    def finish(self, **arrays: Any) -> RowIndex:
        """Convert the collected counts to arrays, and store further ``arrays`` of the reader."""
        self.counts = {name: np.asarray(count) for name, count in self.counts.items()}
        self.arrays = {name: np.asarray(values) for name, values in arrays.items()}
        return self


def _named_kind(value: Any) -> str | None:
    """Return the kind of the media files that a value names, by their suffix."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, dict):
        first = first.get("path")
    if not isinstance(first, str) or len(first) > LONGEST_PATH or any(c.isspace() for c in first):
        return None
    return MEDIA_SUFFIXES.get(first.rpartition(".")[2].lower()) if "." in first else None


def check_unused(survey: Survey, rules: RowRules, source: object) -> None:
    """Raise a ``DataError`` for columns that nothing uses, unless the rules accept them."""
    if rules.ignore_columns is None:
        return
    unused = [name for name in survey.unused if name not in rules.ignore_columns]
    if not unused:
        return
    kinds = {name: MEDIA_COLUMNS.get(name, survey.names_media.get(name)) for name in unused}
    hints = [
        f"{name!r} holds media: data.modalities: {{{kind}: {{column: {name}}}}}"
        for name, kind in kinds.items() if kind
    ]
    forms = ", ".join(repr(form) for form, _ in survey.forms.most_common())
    raise DataError(
        f"{source}: columns {unused} are not used (row form {forms}, first at "
        f"{survey.unused[unused[0]]}). List them in data.ignore_columns, or assign them roles in "
        "the columns of the source: {path: ..., columns: {messages: NAME}}"
        + "".join(f". {hint}" for hint in hints)
    )


def stored_index(
    source: Sequence[str], options: ReaderOptions, files: Sequence[DataPath],
    build: Callable[[], RowIndex],
) -> RowIndex:
    """Return the stored index of a large source (class of the reader and path), or build and store
    it."""
    if sum(map(size_of, files)) < LARGE_SOURCE:
        return build()
    ignored = options.ignore_columns
    content = {
        "version": _VERSION, "source": list(source),
        "files": [[str(file), size_of(file), version_of(file)] for file in files],
        "options": {
            **asdict(options), "frames": sorted(options.frames),
            "ignore_columns": None if ignored is None else sorted(ignored),
        },
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path = cache_folder("indexes") / f"{digest}.npz"
    index = _load(path, options)
    if index is None:
        index = build()
        with written_file(path) as file:
            np.savez_compressed(file, **_to_arrays(index))
    return index


def _to_arrays(index: RowIndex) -> dict[str, Any]:
    survey = vars(index.survey)
    bad = [[row, e.reason, e.column, e.path] for row, e in index.bad.items()]
    return {
        "summary": np.array(json.dumps({"survey": survey, "bad": bad, "rows": len(index)})),
        **{_COUNTS + name: values for name, values in index.counts.items()},
        **{_ARRAYS + name: values for name, values in index.arrays.items()},
    }


def _load(path: Any, options: ReaderOptions) -> RowIndex | None:
    try:
        # Reading the arrays verifies the checksums of the file.
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        summary = json.loads(str(arrays["summary"]))
        index = RowIndex(options)
        index.counts = {name: arrays[_COUNTS + name] for name in index.counts}
        index.arrays = {
            name.removeprefix(_ARRAYS): values for name, values in arrays.items()
            if name.startswith(_ARRAYS)
        }
        index.bad = {
            row: SampleError(reason, column, file) for row, reason, column, file in summary["bad"]
        }
        survey = summary["survey"]
        for name in ("forms", "media", "inline"):
            survey[name] = Counter(survey[name])
        index.survey = Survey(**survey)
        index._rows = summary["rows"]
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error):
        return None
    return index
