"""Processes as seen from outside."""


import os
import signal
import subprocess
import sys
from typing import NamedTuple

import pytest

from raymm.actors.faults import stacks
from raymm.actors.faults.stacks import (
    Address,
    StackFile,
    end_process,
    look_at,
    record_flight,
    records,
    records_text,
)


class Look(NamedTuple):
    records: tuple[str, ...]


def test_files_of_a_process_are_found_by_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"})
    record_flight()
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ  # the user's older variable takes precedence
    prefix = os.environ["TORCH_FR_DUMP_TEMP_FILE"]
    files = [f"{prefix}{rank}" for rank in (0, 1)]
    for file in (*files, str(tmp_path / f"raymm-nccl-{os.getpid()}0-rank-0")):
        open(file, "w").close()
    assert records(os.getpid()) == tuple(files)


def test_only_ranks_with_files_are_listed():
    looks = {1: Look(("/tmp/b", "/tmp/c")), 0: Look(())}
    text = records_text(["rank 0 (llm)", "rank 1 (llm)"], looks)
    assert text.endswith("of rank 1 (llm): /tmp/b, /tmp/c") and text.count("\n") == 1
    assert records_text(["rank 0 (llm)"], {0: Look(())}) == ""


def a_function_with_a_name_of_its_own(address):
    return look_at(address)


def test_the_stacks_of_a_process_name_its_functions():
    before = signal.getsignal(signal.SIGUSR2)
    stacks = StackFile()
    look = a_function_with_a_name_of_its_own(Address("", os.getpid(), stacks.descriptor))
    assert "a_function_with_a_name_of_its_own" in look.stacks
    assert look.records == () and not look.aborted
    assert signal.getsignal(signal.SIGUSR2) == before  # the handler is faulthandler's


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def test_a_stopped_and_a_dead_process_are_not_waited_for(process, tmp_path):
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    log = tmp_path / "err"
    log.write_text("Fatal Python error: Aborted\n")
    stopped = look_at(Address("", process.pid, 0, str(log)))
    assert stopped == ("stopped by a signal", "", (), True)
    end_process(process.pid)
    process.wait()
    assert look_at(Address("", process.pid, 0)) == ("dead", "", (), False)
    end_process(process.pid)  # it is gone already
