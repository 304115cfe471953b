"""Processes as seen from outside."""

import os
import signal
import subprocess
import sys

import pytest

from raymm.actors.faults.stacks import Address, StackFile, end_process, look_at


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
