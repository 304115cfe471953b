"""Connections of this process that other processes opened."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest

from raymm.actors.faults import cut as cut_module
from raymm.actors.faults.cut import OwnConnections, end_after_timeouts, nccl_error


class Group:
    """NCCL group with a recorded error."""

    def __init__(self, error: str) -> None:
        self.error = error

    def _get_backend(self, device) -> Group:
        return self

    def get_error(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.error)


@pytest.fixture
def groups(monkeypatch) -> dict:
    existing: dict = {}
    world = SimpleNamespace(pg_map=existing)
    monkeypatch.setattr(cut_module, "distributed_c10d", SimpleNamespace(_world=world))
    return existing


@pytest.mark.parametrize("error", ["TIMEOUT", "COMM_ERROR", "REMOTE_ERROR"])
def test_the_error_of_any_group_is_returned(error, groups) -> None:
    assert nccl_error() == ""
    groups[Group("SUCCESS")] = "nccl", None
    groups[object()] = "gloo", None
    assert nccl_error() == ""
    groups[Group(error)] = "nccl", None
    assert nccl_error() == error
    groups.clear()  # like aborted groups
    assert nccl_error() == ""


def test_a_timeout_spares_processes_with_aborted_groups(groups, monkeypatch) -> None:
    ended, sleeps = threading.Event(), []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if seconds == cut_module.RECORD_S and sleeps.count(seconds) == 1:
            groups.clear()
        elif len(sleeps) > 4 and not groups:
            groups[Group("TIMEOUT")] = "nccl", None

    monkeypatch.setattr(cut_module, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(cut_module, "os", SimpleNamespace(abort=ended.set))
    groups[Group("TIMEOUT")] = "nccl", None
    end_after_timeouts()
    assert ended.wait(60)
    assert sleeps.count(cut_module.RECORD_S) == 2  # the first one ended no process


def connected(listener):
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    return near, far


def test_only_connections_accepted_since_the_start_are_cut():
    with socket.create_server(("127.0.0.1", 0)) as before:
        connections = OwnConnections()
        with socket.create_server(("127.0.0.1", 0)) as later:
            kept, cut = connected(before), connected(later)
            assert connections.cut() == 1
            for end in cut:  # fails at once, instead of waiting
                assert end.recv(1) == b""
            for sender, receiver in (kept, kept[::-1]):
                sender.sendall(b"x")
                assert receiver.recv(1) == b"x"
            for end in (*kept, *cut):
                end.close()
