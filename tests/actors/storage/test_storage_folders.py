"""Folders and buckets behave the same.

Temporary failures are retried, and invalid locations are rejected.
"""

import secrets
import tempfile
from itertools import repeat
from pathlib import Path

import pytest

from raymm.actors.faults import observed_actor
from raymm.actors.faults.observed_actor import problem_seeing
from raymm.actors.storage import bucket as buckets
from raymm.actors.storage.bucket import BucketFolder
from raymm.actors.storage.location import check_location, storage_folder


@pytest.fixture(params=["folder", "bucket", "vault", "arrow"])
def folder(request, tmp_path, monkeypatch):
    if request.param == "folder":
        return storage_folder(tmp_path / "run")
    if request.param in ("vault", "arrow"):
        monkeypatch.setenv("VAULT", str(tmp_path))
        buckets.connect.cache_clear()
        return storage_folder(f"tests.support.custom_file_systems:{request.param}://runs/a")
    server = request.getfixturevalue("s3")
    return storage_folder(server.url(secrets.token_hex(4)))


def test_a_folder_and_a_bucket_behave_the_same(folder):
    assert folder.names() == [] and folder.files() == []
    with pytest.raises(FileNotFoundError):
        folder.read("none")
    folder.unlink("none")
    step = folder / "checkpoints" / "step"
    step.create()
    for data in (b"1", b"", b"22"):
        step.replace("a", data)
        assert step.read("a") == data
    large = secrets.token_bytes(12 * 2**20)  # in two parts
    with step.writing("b") as path:
        path.write_bytes(large)
    with step.reading("b") as path:
        assert path.read_bytes() == large
    (step / "deeper").create()
    (step / "deeper").replace("c", b"3")
    folder.replace("log", b"4")
    assert step.names() == ["a", "b", "deeper"] and step.name == "step"
    assert folder.files() == [
        "checkpoints/step/a", "checkpoints/step/b", "checkpoints/step/deeper/c", "log",
    ]
    again = storage_folder(folder.place) / "checkpoints/step"
    assert again == step and again.read("deeper/c") == b"3"
    step.unlink("a")
    step.rename("other")
    assert folder.files() == ["checkpoints/other/b", "checkpoints/other/deeper/c", "log"]
    other = folder / "checkpoints" / "other"
    with other.reading("b") as path:
        assert path.read_bytes() == large
    with pytest.raises(OSError, match="not empty"):
        other.remove()
    assert other.parent.parent == folder and not other.is_link
    other.unlink("b")
    (other / "deeper").unlink("c")
    (other / "deeper").remove()
    other.remove()
    assert folder.files() == ["log"] and "other" not in (folder / "checkpoints").names()


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


@pytest.mark.parametrize(("location", "as_is"), [
    ("runs/a", "runs/a"), ("~/a", "~/a"), ("file:///a/b%20c", "/a/b c"),
    ("file://localhost/a", "/a"), ("s3://b/c", "s3://b/c"), ("S3://b/c", "s3://b/c"),
    ("gs://b/c?scheme=http", "gs://b/c?scheme=http"),
])  # fmt: skip
def test_locations(location, as_is):
    assert check_location(location) == as_is


@pytest.mark.parametrize(("location", "reason"), [
    ("nofs://a/b", "nofs:// is not known; accepted: a folder, or a URL .* s3:// or gs://"),
    ("tests.support.custom_file_systems:vault://a/b?x=y", r"\?x= is not known; accepted: none"),
    ("tests.support.custom_file_systems:failing://a/b",
     "failing raised KeyError: 'token'; accepted: module:f"),
    ("tests.support.custom_file_systems:number://a/b",
     "number returned int; accepted: module:function"),
    ("tests.support.custom_file_systems:absent://a/b",
     "run.storage_path is 'tests.support.custom_file_systems:absent'"),
    ("memory://a/b", "memory:// is not known"),
    ("s4://a/b", "s4:// is not known"), ("https://a/b", "https:// is not known"),
    ("s3:/a/b", "two slashes"), ("file:a", "two slashes"), ("s3://a", "expected s3://BUCKET/FOL"),
    ("s3:///a", "expected s3://BUCKET/FOLDER"), ("file://host/a", "must not name another host"),
    ("s3://a/b?x=y", r"\?x= is not known; accepted: endpoint_override, scheme, region"),
    ("s3://a/b#c", "%23"), ("s3://key:secret@a/b", "it has credentials"),
    ("s3://a/b?secret_key=c", "it has credentials"),
])  # fmt: skip
def test_invalid_locations_are_refused(location, reason):
    with pytest.raises(ValueError, match=reason):
        check_location(location)
    with pytest.raises(ValueError, match=reason):
        storage_folder(location)


def test_another_folder_of_the_same_name_is_noticed(folder, monkeypatch):
    monkeypatch.setattr(observed_actor, "SEEN_WITHIN_S", 0.0)
    folder.create()
    folder.replace("token", b"mine")
    assert problem_seeing(folder.location, "token", "mine") is None
    assert folder.names() == ["token"]
    assert "a different file" in (problem_seeing(folder.location, "token", "other") or "")
    for elsewhere in ((folder / "elsewhere").location, "/dev/null/run"):
        problem = problem_seeing(elsewhere, "token", "mine")
        assert problem is not None
        assert "does not find the file that the driver wrote there" in problem
    assert folder.names() == ["token"]


def test_a_folder_that_cannot_be_written_is_noticed():
    version = Path("/proc/version").read_text()
    assert "cannot use it: " in (problem_seeing("/proc", "version", version) or "")
