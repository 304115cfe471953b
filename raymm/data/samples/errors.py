"""Errors of the data pipeline; those of data survive pickling between Ray processes."""

from collections.abc import Sequence
from typing import Any

from raymm.data.remote.errors import DataError
from raymm.errors import InternalError, RunFailedError


class DataWorkerError(RunFailedError):
    """A data worker died, or does not go on. Names it and what it was loading."""


class NoneUsableError(DataError):
    """No sample of a step can be used.

    Args:
        message: says why.
        skipped: its samples, as they are reported.
    """

    def __init__(self, message: str, skipped: Sequence[Any]) -> None:
        super().__init__(message)
        self.skipped = list(skipped)

    def __reduce__(self):
        return NoneUsableError, (str(self), self.skipped), vars(self)


class SampleError(DataError):
    """One sample cannot be used. ``data.on_error`` decides whether it is skipped.

    Args:
        sample_id: the sample's ``id`` (or its place, like ``FILE:LINE``, where the row has none).
        path: the media file at fault, or None when the row itself is.
        reason: what is wrong; made one line.
        column: the column of the row at fault, if one is.
        place: the data file and where in it the row is, like ``FILE:LINE``.
    """

    def __init__(
        self,
        sample_id: str,
        path: str | None,
        reason: str,
        column: str | None = None,
        place: str | None = None,
    ):
        reason = " ".join(reason.split())  # libraries' messages may be long-winded
        self.sample_id, self.path, self.reason = sample_id, path, reason
        self.column, self.place = column, place
        where = f" ({place})" if place and place != sample_id else ""
        where += f", column {column!r}" if column else ""
        where += f", file {path}" if path else ""
        super().__init__(f"sample {sample_id!r}{where}: {reason}")

    def __reduce__(self):
        values = self.sample_id, self.path, self.reason, self.column, self.place
        return SampleError, values, vars(self)


class RowError(InternalError, ValueError):
    """What is wrong with a row, for a reader that knows the row's place and id.

    Args:
        reason: what is wrong.
        column: the column at fault, if one is.
        file: the media file at fault, if one is.
    """

    def __init__(self, reason: str, column: str | None = None, file: str | None = None):
        super().__init__(reason)
        self.reason, self.column, self.file = reason, column, file
