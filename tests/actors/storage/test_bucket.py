"""Files of a bucket: failures are retried, and nothing remains on this machine."""

import tempfile
from itertools import repeat

import pytest

from raymm.actors.storage import bucket as buckets
from raymm.actors.storage.bucket import BucketFolder
from raymm.actors.storage.location import storage_folder


def test_no_file_remains_on_this_machine(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = storage_folder(s3.url("scratch"))
    with folder.writing("a") as path:
        path.write_bytes(b"1")
        assert path.is_relative_to(tmp_path)
    with pytest.raises(ZeroDivisionError), folder.writing("b") as path:
        path.write_bytes(b"2")
        raise ZeroDivisionError
    with folder.reading("a") as path:
        assert path.read_bytes() == b"1"
    assert folder.names() == ["a"] and list(tmp_path.iterdir()) == []


def failing(s3, what, statuses):
    """Answer requests for a name with these error statuses, one each."""
    statuses = iter(statuses)
    s3.before = lambda method, key: next(statuses, None) if what in key else None


def test_temporary_failures_are_retried(s3, monkeypatch):
    """Fail more often than AWS' library retries, which is three times."""
    monkeypatch.setattr(buckets, "FIRST_WAIT_S", 0.01)
    folder = storage_folder(s3.url("retries"))
    failing(s3, "/flaky", [503] * 7)
    folder.replace("flaky", b"1")
    failing(s3, "/flaky", [500] * 7)
    assert folder.read("flaky") == b"1"
    failing(s3, "/flaky", [503] * 7)
    folder.unlink("flaky")
    assert folder.names() == []


def test_lasting_failures_end_with_an_error(s3, monkeypatch):
    monkeypatch.setattr(buckets, "FIRST_WAIT_S", 0.01)
    folder = BucketFolder(s3.url("retries"), retry_for_s=0.1)
    failing(s3, "/broken", repeat(503))
    with pytest.raises(OSError, match="broken"):
        folder.read("broken")
    # Retries of these are useless.
    s3.requests.clear()
    folder = storage_folder(s3.url("retries"))
    failing(s3, "/forbidden", repeat(403))
    with pytest.raises(OSError, match="forbidden.*ACCESS_DENIED"):
        folder.read("forbidden")
    with pytest.raises(OSError, match="nobodys"):
        storage_folder(s3.url("x").replace("s3://runs", "s3://nobodys")).replace("a", b"")
    assert len(s3.requests) < 5


def test_the_server_may_be_named_in_the_environment(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{s3.endpoint}")
    storage_folder("s3://runs/environment").replace("a", b"1")
    assert storage_folder(s3.url("environment")).read("a") == b"1"
