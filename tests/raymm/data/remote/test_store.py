"""The error for a file that changed while a run was reading it."""

from raymm.data.remote.store import FileVersion, changed
from raymm.data.remote.urls import DataUrl


def test_a_change_is_reported_with_both_versions():
    url = DataUrl("s3", "b", "rows.jsonl")
    text = str(changed(url, FileVersion(1234, "x"), FileVersion(5, "")))
    assert text.startswith("s3://b/rows.jsonl changed while the run was reading it: ")
    assert "it had 1,234 bytes and tag x, and now has 5 bytes and tag none" in text
