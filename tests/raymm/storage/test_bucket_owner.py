"""One run at a time in a bucket, where files can only be replaced.

A folder with the same operations replaces the bucket.
"""

import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from raymm.actors.storage.folder import LocalFolder
from raymm.errors import ConfigError, RunError
from raymm.storage import run_folder
from raymm.storage.run_folder import OWNER, BucketOwner, Owner


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "HEARTBEAT_S", 0.05)
    shorter = {"SETTLE_S": 0.4, "SEEN_S": 0.0, "LOOK_S": 0.02, "GONE_AFTER_S": 0.6}
    for name, seconds in shorter.items():
        monkeypatch.setattr(run_folder, name, seconds)
    return LocalFolder(tmp_path)


def elsewhere(owner):
    """Return an owner whose process seems to be on another machine."""
    owner._me = replace(owner._me, host="far", boot="another")
    return owner


def test_a_second_owner_is_rejected_with_the_first(folder):
    with BucketOwner(folder) as owner:
        owner.check()
        with pytest.raises(ConfigError, match="belongs to an active run: process"):
            BucketOwner(folder).__enter__()
        owner.check()
    assert folder.names() == []


def test_a_remote_owner_lives_while_it_sends_heartbeats(folder):
    said = []
    with elsewhere(BucketOwner(folder)) as owner:
        with pytest.raises(ConfigError, match="on far"):
            BucketOwner(folder, said.append).__enter__()
        owner._left.set()  # no further heartbeats
        owner._beating.join()
        with BucketOwner(folder, said.append) as heir:
            heir.check()
            with pytest.raises(RunError, match="belongs to process"):
                owner.check()
    assert "waiting for its next heartbeat" in said[0] and "on far, " in said[-1]
    assert said[-1].endswith("which is gone")


def test_an_ended_owner_is_replaced_immediately(folder, monkeypatch):
    monkeypatch.setattr(run_folder, "GONE_AFTER_S", 1000.0)
    code = (
        "import sys, os, signal; from raymm.actors.storage.folder import LocalFolder\n"
        "from raymm.storage import run_folder; run_folder.SETTLE_S = 0.1\n"
        "run_folder.BucketOwner(LocalFolder(sys.argv[1])).__enter__()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, folder.location], check=False, timeout=120)
    assert folder.names() == [OWNER]
    with BucketOwner(folder) as owner:
        owner.check()


def test_an_anonymous_owner_file_expires(folder):
    folder.replace(OWNER, b"[]")
    with BucketOwner(folder) as owner:
        owner.check()
        folder.unlink(OWNER)
        with pytest.raises(RunError, match="is gone"):
            owner.check()


def test_one_of_many_concurrent_owners_wins(folder):
    """Start within the time that an owner may take to register."""
    owned, refused, done = [], [], threading.Event()

    def enter(delay):
        time.sleep(delay)
        try:
            with BucketOwner(folder) as owner:
                owned.append(owner)
                done.wait(30)
        except ConfigError:
            refused.append(delay)

    threads = [threading.Thread(target=enter, args=(i * 0.02,)) for i in range(6)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while len(refused) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    done.set()
    for thread in threads:
        thread.join()
    assert len(owned) == 1 and len(refused) == 5


def test_a_bucket_that_cannot_be_written_is_refused():
    with pytest.raises(ConfigError, match="'/proc'; expected a bucket that can be read and writt"):
        BucketOwner(LocalFolder("/proc")).__enter__()


def test_owners_are_distinguished():
    assert Owner.from_bytes(b"{", 1) != Owner.from_bytes(b"{", 2)
