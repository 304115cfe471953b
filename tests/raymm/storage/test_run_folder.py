"""Working folders of runs: local, or local and mirrored into a bucket."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from raymm.actors.faults import observed_actor
from raymm.actors.faults.observed_actor import problem_seeing
from raymm.actors.optimizer.checkpoint_shards import write_shard
from raymm.actors.rank.rank_group import RankPlace
from raymm.actors.storage import bucket
from raymm.actors.storage.folder import FILE_MODE, replace_file, set_file_modes
from raymm.errors import ConfigError, RunFileError
from raymm.files.run_files import remove_partial
from raymm.storage import run_folder
from raymm.storage.run_folder import RunFolder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "SETTLE_S", 0.5)
    monkeypatch.setenv("RAYMM_CACHE", str(tmp_path / "cache"))


def test_a_local_run_works_in_its_folder(tmp_path):
    folder = RunFolder(str(tmp_path / "run"))
    folder.check()
    with folder.owned(print) as check_owner:
        check_owner()
        (folder.path / "metrics.jsonl").write_text("1")
        folder.mirror()
    assert folder.path == tmp_path / "run" and not (tmp_path / "cache").exists()
    assert [file.name for file in folder.path.iterdir()] == ["metrics.jsonl"]


def test_a_bucket_gets_changes_and_restores_them(s3, tmp_path, monkeypatch):
    folder = RunFolder(s3.url("mirrored"))
    folder.check()
    with folder.owned(print) as check_owner:
        check_owner()
        (folder.path / "metrics.jsonl").write_text("1")
        (folder.path / "faults").mkdir()
        (folder.path / "faults" / "rank0.txt").write_text("2")
        (folder.path / ".half.raymm-partial").write_text("3")
        folder.mirror()
        assert folder.storage.read("metrics.jsonl") == b"1"
        s3.requests.clear()
        folder.mirror()
        assert s3.requests == []  # nothing has changed
        (folder.path / "metrics.jsonl").write_text("12")
    assert folder.storage.files() == ["faults/rank0.txt", "metrics.jsonl"]

    # Leftovers on another machine are not the content of the bucket.
    monkeypatch.setenv("RAYMM_CACHE", str(tmp_path / "elsewhere"))
    again = RunFolder(s3.url("mirrored"))
    again.check()
    (again.path / "trace.json").write_text("old")
    with pytest.raises(ZeroDivisionError), again.owned(print):
        assert again.path != folder.path and not (again.path / "trace.json").exists()
        assert (again.path / "metrics.jsonl").read_text() == "12"
        assert (again.path / "faults" / "rank0.txt").read_text() == "2"
        (again.path / "faults" / "rank1.txt").write_text("3")
        raise ZeroDivisionError
    assert again.storage.read("faults/rank1.txt") == b"3"


def test_missing_and_vanished_buckets_are_reported(s3, monkeypatch):
    missing = RunFolder(s3.url("x").replace("s3://runs", "s3://nobodys"))
    with pytest.raises(ConfigError, match="storage_path is 's3://nobodys/x.*NO_SUCH_BUCKET"):
        missing.check()
    folder = RunFolder(s3.url("gone"))
    folder.check()
    (folder.path / "metrics.jsonl").write_text("1")
    monkeypatch.setattr(bucket, "FIRST_WAIT_S", 0.01)
    s3.before = lambda method, key: 503
    with pytest.raises(RunFileError, match="cannot write s3://runs/gone/metrics.jsonl.*: .*503"):
        folder.mirror(retry_for_s=0.1)


def test_nodes_with_another_folder_at_the_path_are_named(tmp_path, monkeypatch):
    """Mount another folder at that path on the second rank's node."""
    monkeypatch.setattr(observed_actor, "SEEN_WITHIN_S", 0.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    mounted = [str(tmp_path / "run"), str(tmp_path / "run")]

    def call(method, location, name, token):
        assert method == "sees" and location == str(tmp_path / "run")
        return [problem_seeing(path, name, token) for path in mounted]

    places = (RankPlace("vision.0", "node-a", 1), RankPlace("llm.0", "node-b", 2))
    group = SimpleNamespace(call=call, places=places)
    folder = RunFolder(str(tmp_path / "run"))
    folder.check_seen_by(group)
    mounted[1] = str(tmp_path / "other")
    with pytest.raises(ConfigError, match="llm.0 on node-b does not find the file that"):
        folder.check_seen_by(group)
    assert list((tmp_path / "run").iterdir()) == []


def test_names_outside_the_folder_are_ignored(s3, tmp_path, monkeypatch):
    folder = RunFolder(s3.url("names"))
    folder.check()
    # pyarrow's client joins ".." itself; other clients write such names.
    names = ["../../../out.txt", "a/../../../../out.txt", "/out.txt", "in.txt"]
    monkeypatch.setattr(type(folder.storage), "files", lambda self: names)
    kind, read = type(folder.storage), type(folder.storage).read
    monkeypatch.setattr(kind, "read", lambda self, n: b"1" if n in names else read(self, n))
    with folder.owned(print):
        assert list(tmp_path.rglob("*.txt")) == [folder.path / "in.txt"]


@pytest.mark.parametrize("depth", [1, 3])
def test_concurrent_starts_have_one_owner(tmp_path, depth):
    """Check that the second process is rejected with the owner's name, not with existing files."""
    racers = 4
    for number in range(15):
        path = tmp_path / str(number) / "/".join("abc"[:depth])
        ready, ended = threading.Barrier(racers), threading.Barrier(racers)

        def start(path=path, ready=ready, ended=ended):
            folder = RunFolder(str(path))
            ready.wait()
            try:
                folder.check()
                with folder.owned(lambda line: None):
                    replace_file(path / "config.yaml", b"1")
                    for file in remove_partial(path):
                        assert file.name.endswith(".raymm-partial")
                    ended.wait()
                    return "owner"
            except ConfigError as error:
                ended.wait()
                return str(error)
            except BaseException:
                ended.abort()
                raise

        with ThreadPoolExecutor(racers) as pool:
            said = [future.result() for future in [pool.submit(start) for _ in range(racers)]]
        assert said.count("owner") == 1
        assert all(f"process {os.getpid()} on" in text for text in said if text != "owner")


# Script for processes that create, own and fill the same new folder at the same moment. Prints a
# line of JSON for each folder: the process that owned it, and the rejections of the others.
STARTS = """
import json, os, sys
from raymm.actors.storage.folder import replace_file
from raymm.files.run_files import remove_partial
from raymm.errors import ConfigError
from raymm.storage.run_folder import RunFolder

def start(path, ready, said, ended):
    folder = RunFolder(path)
    os.read(ready, 1)
    try:
        folder.check()
        with folder.owned(lambda line: None):
            replace_file(folder.path / "config.yaml", b"1")
            list(remove_partial(folder.path))
            os.write(said, json.dumps(["owner", os.getpid()]).encode() + b"\\n")
            os.read(ended, 1)
    except ConfigError as error:
        os.write(said, json.dumps(["refused", str(error)]).encode() + b"\\n")
    except BaseException as error:
        os.write(said, json.dumps(["failed", repr(error)]).encode() + b"\\n")
    os._exit(0)

for path in sys.argv[2:]:
    (ready, go), (said, say), (ended, end) = os.pipe(), os.pipe(), os.pipe()
    racers = int(sys.argv[1])
    pids = []
    for _ in range(racers):
        if not (pid := os.fork()):
            start(path, ready, say, ended)
        pids.append(pid)
    os.write(go, b"g" * racers)
    with open(said) as lines:
        print(json.dumps([json.loads(lines.readline()) for _ in range(racers)]))
    os.write(end, b"e")
    for pid in pids:
        os.waitpid(pid, 0)
    for file in (ready, go, say, ended, end):
        os.close(file)
"""


@pytest.mark.system
def test_concurrent_processes_have_one_owner(tmp_path):
    racers = 4
    folders = [tmp_path / f"{n}/a" if n % 2 else tmp_path / f"{n}/a/b/c" for n in range(30)]
    done = subprocess.run(
        [sys.executable, "-c", STARTS, str(racers), *map(str, folders)],
        capture_output=True, text=True, timeout=500,
    )
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == len(folders), done.stderr
    for said, folder in zip(rounds, folders, strict=True):
        (owner,) = (value for what, value in said if what == "owner")
        refused = [value for what, value in said if what == "refused"]
        assert len(refused) == racers - 1, said
        assert all(f"process {owner} on" in text for text in refused), said
        assert [file.name for file in folder.iterdir()] == ["config.yaml"]


def test_checkpoint_files_follow_the_umask(tmp_path):
    """Check the mode, as safetensors creates files for their owner alone."""
    write_shard(tmp_path / "model-rank0.safetensors", {"x": torch.ones(2)})
    replace_file(tmp_path / "manifest.json", b"{}")
    (tmp_path / "plain").touch()
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1


def test_files_with_other_names_keep_their_modes(tmp_path):
    (own := tmp_path / "folder" / "own").parent.mkdir()
    (other := tmp_path / "other").touch()
    own.touch()
    own.chmod(0o600)
    other.chmod(0o600)
    (tmp_path / "folder" / "linked").hardlink_to(other)
    (tmp_path / "folder" / "link").symlink_to(other)
    set_file_modes(tmp_path / "folder")
    assert other.stat().st_mode & 0o777 == 0o600
    assert own.stat().st_mode & 0o777 == FILE_MODE
