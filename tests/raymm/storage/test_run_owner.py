"""One run at a time in a folder."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from raymm.cli.main import EXIT_USER_ERROR
from raymm.errors import ConfigError, RunError, RunFileError
from raymm.storage import run_folder
from raymm.storage.run_folder import OWNER, Owner, RunOwner
from tests.support.processes import end_group, wait_until
from tests.support.tiny_run import child_environment, curve, start

RACERS, ROUNDS = 8, 25
PATIENCE_S = 120.0

# Script that owns a folder until its standard input ends.
HOLDER = """
import sys
from pathlib import Path
from raymm.storage.run_folder import RunOwner
with RunOwner(Path(sys.argv[1]), print):
    print("owner", flush=True)
    sys.stdin.read()
"""

# In every round many processes try to take the folder of a killed one. The winner holds it until
# all others were rejected, and is then killed.
RACE = """
import json, os, signal, sys
from pathlib import Path
from raymm.errors import ConfigError
from raymm.storage.run_folder import RunOwner

folder, racers, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def race(go, outcome, held):
    os.read(go, 1)
    try:
        with RunOwner(folder):
            os.write(outcome, b"w")
            os.read(held, 1)
            os.kill(os.getpid(), signal.SIGKILL)
    except ConfigError:
        os.write(outcome, b"r")
    os._exit(0)

found = []
for _ in range(rounds):
    go, outcome, held = os.pipe(), os.pipe(), os.pipe()
    pids = []
    for _ in range(racers):
        if not (pid := os.fork()):
            race(go[0], outcome[1], held[0])
        pids.append(pid)
    os.write(go[1], b"g" * racers)
    said = b""
    while len(said) < racers:
        said += os.read(outcome[0], racers)
    os.write(held[1], b"h" * racers)
    for pid in pids:
        os.waitpid(pid, 0)
    for end in (*go, *outcome, *held):
        os.close(end)
    found.append(said.count(b"w"))
print(json.dumps(found))
"""


def elsewhere(**changes):
    """Return an owner on another machine."""
    values = {"host": "far", "boot": "another", "since": "2026-01-01T00:00:00+00:00", **changes}
    return replace(Owner.this_process(), **values)


def owned_by(folder, owner):
    (folder / OWNER).write_text(json.dumps(asdict(owner)))


def python(script, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], text=True, env=child_environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options,
    )


def test_the_owner_is_named_and_the_folder_is_free_after_it(tmp_path):
    with RunOwner(tmp_path) as owner:
        owner.check()
        with pytest.raises(ConfigError) as error, RunOwner(tmp_path):
            pass
        host = os.uname().nodename
        since = json.loads((tmp_path / OWNER).read_text())["since"]
        assert f"storage_path is {str(tmp_path)!r}" in str(error.value)
        assert f"process {os.getpid()} on {host}, since {since}" in str(error.value)
        assert "end it, or set another storage_path" in str(error.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), RunOwner(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ray
@pytest.mark.system
@pytest.mark.timeout(600)
def test_a_concurrent_command_is_rejected_with_the_owner(make_config, tmp_path):
    """Start the same command twice in a folder that does not exist yet."""
    config = make_config({
        "parallel": {"encoders": {"vision": {"ranks": [0]}}, "language_model": {"ranks": [0]}},
        "run.steps": 3,
    })
    logs = [tmp_path / "first", tmp_path / "second"]
    commands = [start(["train", config], tmp_path, log) for log in logs]
    try:
        codes = [command.wait(5 * PATIENCE_S) for command in commands]
    finally:
        for command in commands:
            end_group(command.pid)
            command.wait()
    texts = [log.read_text() for log in logs]
    # On a busy machine the second may start after the first has ended, and finds nothing to do.
    assert 0 in codes and set(codes) <= {0, EXIT_USER_ERROR}, texts
    owner = commands[codes.index(0)]
    for code, text in zip(codes, texts, strict=True):
        assert "Traceback" not in text
        if code:
            assert "ConfigError" in text and f"process {owner.pid} on" in text, text
        assert code or "loss curve" in text or "nothing to do" in text, text
    assert [step for step, *_ in curve(tmp_path / "run")] == [1, 2, 3]
    assert not (tmp_path / "run" / OWNER).exists()


def test_a_killed_owner_is_replaced_without_waiting(tmp_path, monkeypatch):
    """Check that a dead process is detected without waiting."""
    with python(HOLDER, tmp_path) as process:
        assert process.stdout.readline() == "owner\n"
        with pytest.raises(ConfigError, match=f"process {process.pid} on "):
            RunOwner(tmp_path).__enter__()
        process.send_signal(signal.SIGKILL)
        # A zombie process counts as dead, too.
        wait_until(
            lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2][1] == "Z",
            PATIENCE_S, "its end",
        )
        # From here on: the patched clock is global, and the wait above uses it.
        monkeypatch.setattr(run_folder.time, "sleep", lambda seconds: pytest.fail("it waits"))
        said = []
        with RunOwner(tmp_path, said.append):
            assert f"belonged to process {process.pid} on " in said[0]
    assert list(tmp_path.iterdir()) == []


def test_one_of_many_concurrent_takeovers_wins(tmp_path):
    with python(RACE, tmp_path, RACERS, ROUNDS) as process:
        winners = json.loads(process.communicate(timeout=PATIENCE_S)[0])
    assert winners == [1] * ROUNDS
    with RunOwner(tmp_path):
        assert [file.name for file in tmp_path.iterdir()] == [OWNER]


def test_a_link_request_repeated_by_nfs_succeeds(tmp_path, monkeypatch):
    """Repeat a request as NFS clients do after a lost reply; the file then already exists."""
    link = os.link

    def repeated(source, target):
        link(source, target)
        link(source, target)

    monkeypatch.setattr(run_folder.os, "link", repeated)
    with RunOwner(tmp_path) as owner:
        owner.check()
        with pytest.raises(ConfigError, match="storage_path is"), RunOwner(tmp_path):
            pass


def test_a_reused_process_id_is_another_process(tmp_path):
    me = Owner.this_process()
    owned_by(tmp_path, replace(me, started=me.started + 1))
    with RunOwner(tmp_path) as owner:
        owner.check()


def test_a_remote_owner_is_checked_by_its_heartbeats(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LOOK_S", 0.01)
    owned_by(tmp_path, elsewhere())
    beats = threading.Event()

    def beat():
        while not beats.wait(0.02):
            os.utime(tmp_path / OWNER)

    thread = threading.Thread(target=beat)
    thread.start()
    said = []
    try:
        with pytest.raises(ConfigError, match="process .* on far, since 2026-01-01"):
            RunOwner(tmp_path, said.append).__enter__()
        assert "waiting for its next heartbeat for at most" in said[0]
    finally:
        beats.set()
        thread.join()
    monkeypatch.setattr(run_folder, "GONE_AFTER_S", 0.1)
    with RunOwner(tmp_path, said.append):
        assert "belonged to" in said[-1] and "on far" in said[-1]
    # The owner has been silent for long: no further wait.
    monkeypatch.setattr(run_folder, "GONE_AFTER_S", 60.0)
    monkeypatch.setattr(run_folder.time, "sleep", lambda seconds: pytest.fail("it waits"))
    owned_by(tmp_path, elsewhere(namespace=None))
    os.utime(tmp_path / OWNER, times=(0, time.time() - 61))
    with RunOwner(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b'{"pid": "x"}', b"\xff\xff"])
def test_an_owner_file_without_a_name_can_expire(tmp_path, monkeypatch, text):
    (tmp_path / OWNER).write_bytes(text)
    monkeypatch.setattr(run_folder, "LOOK_S", 0.01)
    monkeypatch.setattr(run_folder, "GONE_AFTER_S", 0.05)
    with RunOwner(tmp_path) as owner:
        owner.check()


def test_a_killed_claimant_is_replaced(tmp_path):
    """Kill a process after it linked its claim, before it replaced the owner."""
    gone = [replace(Owner.this_process(), started=number) for number in (1, 2)]
    owned_by(tmp_path, gone[0])
    (tmp_path / f".owner-after-{gone[0].token}").write_text(json.dumps(asdict(gone[1])))
    with RunOwner(tmp_path) as owner:
        owner.check()
        assert [file.name for file in tmp_path.iterdir()] == [OWNER]


def test_a_replaced_owner_is_notified(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "HEARTBEAT_S", 0.01)
    with RunOwner(tmp_path) as owner:
        os.utime(tmp_path / OWNER, times=(0, 0))
        wait_until(lambda: (tmp_path / OWNER).stat().st_mtime > 1, PATIENCE_S, "a sign of life")
        (tmp_path / OWNER).unlink()
        with pytest.raises(RunError, match="no longer belongs to this run: .*owner.json is gone"):
            owner.check()
        owned_by(tmp_path, other := elsewhere())
        os.utime(tmp_path / OWNER, times=(0, 0))
        with pytest.raises(RunError, match=f"belongs to process {other.pid} on far"):
            owner.check()
        time.sleep(0.05)  # it renews only its own claim
    assert (tmp_path / OWNER).stat().st_mtime == 0


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="run.storage_path is .*none'; .* folder that can be"):
        RunOwner(tmp_path / "none").__enter__()


def test_an_unreadable_owner_file_is_named(tmp_path):
    with RunOwner(tmp_path) as owner:
        (tmp_path / OWNER).unlink()
        (tmp_path / OWNER).mkdir()
        with pytest.raises(RunFileError, match=f"cannot read {tmp_path / OWNER}: Is a directory"):
            owner.check()


def test_a_second_run_touches_nothing(finished, raymm, make_config, tmp_path, no_new_actors):
    """Check that neither metrics nor unfinished saves of the first run are deleted."""
    run = finished.copy_until(tmp_path / "run", 10)
    torn = run / "checkpoints" / "step-00000012"
    torn.mkdir()
    (torn / ".not-committed.raymm-partial").touch()
    with RunOwner(run):
        before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
        code, text = raymm("train", make_config())
        assert code == 2 and "ConfigError" in text and f"process {os.getpid()} on" in text
        assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before
