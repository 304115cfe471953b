"""Errors of NCCL's watchdog, with process groups that only have errors."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from raymm.actors.faults import nccl_errors
from raymm.actors.faults.nccl_errors import end_after_timeouts, nccl_error


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
    monkeypatch.setattr(nccl_errors, "distributed_c10d", SimpleNamespace(_world=world))
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
        if seconds == nccl_errors.RECORD_S and sleeps.count(seconds) == 1:
            groups.clear()
        elif len(sleeps) > 4 and not groups:
            groups[Group("TIMEOUT")] = "nccl", None

    monkeypatch.setattr(nccl_errors, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(nccl_errors, "os", SimpleNamespace(abort=ended.set))
    groups[Group("TIMEOUT")] = "nccl", None
    end_after_timeouts()
    assert ended.wait(60)
    assert sleeps.count(nccl_errors.RECORD_S) == 2  # the first one ended no process
