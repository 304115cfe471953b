"""Errors of the data pipeline; both survive pickling between Ray processes."""


class DataError(Exception):
    """Bad data, or data that cannot be read; the message names the file, field or sample."""


class SampleError(DataError):
    """One sample cannot be used. ``data.on_error`` decides whether it is skipped.

    Args:
        sample_id: the sample's ``id`` (or ``FILE:LINE`` where the row has none).
        path: the media file at fault, or None when the row itself is.
        reason: what is wrong; made one line.
    """

    def __init__(self, sample_id: str, path: str | None, reason: str):
        reason = " ".join(reason.split())  # libraries' messages may be long-winded
        self.sample_id, self.path, self.reason = sample_id, path, reason
        where = f", file {path}" if path else ""
        super().__init__(f"sample {sample_id!r}{where}: {reason}")

    def __reduce__(self):
        return SampleError, (self.sample_id, self.path, self.reason)
