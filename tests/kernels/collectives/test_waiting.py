"""Waits raise communication errors, and stacks show whether a thread waits for others."""

from __future__ import annotations

import sys
import threading
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from raymm.kernels.collectives.waiting import (
    is_communication,
    is_waiting,
    receive_from,
    send_to,
    wait,
    waits_for_others,
)


class Work:
    """Started operation that ends, or fails, and records its timeout."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.timeouts = error, []

    def wait(self, *timeout: timedelta) -> None:
        self.timeouts.append(timeout)
        if self.error:
            raise self.error


def test_a_failed_wait_is_a_communication_error():
    with pytest.raises(dist.DistError, match="connection reset"):
        wait(Work(RuntimeError("connection reset")))
    with pytest.raises(ValueError):  # not an error of the operation
        wait(Work(ValueError()))


def test_the_timeout_of_the_group_is_the_default():
    work = Work()
    wait(work)
    wait(work, timedelta(seconds=3))
    assert work.timeouts == [(), (timedelta(seconds=3),)]


def pair(group, dtype):
    """Send this rank's tensor to the other rank, and return the tensor received."""
    rank = dist.get_rank(group)
    sent = torch.full((3,), rank + 1, dtype=dtype)
    received = torch.zeros(3, dtype=dtype)
    works = [send_to(group, 1 - rank, 5, sent), receive_from(group, 1 - rank, 5, received)]
    for work in works:
        wait(work)
    return received


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_two_ranks_exchange_tensors(processes, dtype):
    for rank, received in enumerate(processes.run(pair, 2, dtype=dtype)):
        assert torch.equal(received, torch.full((3,), 2 - rank, dtype=dtype))


def test_code_that_communicates_is_recognized():
    assert is_communication(wait.__code__)
    assert is_communication(dist.all_reduce.__wrapped__.__code__)
    assert not is_communication(test_code_that_communicates_is_recognized.__code__)
    tensor_module = next(m for name, m in sys.modules.items() if name == "torch.distributed.tensor")
    assert not is_communication(tensor_module.distribute_tensor.__code__)


def plainly(event: threading.Event) -> None:
    event.wait()


@waits_for_others
def for_others(event: threading.Event) -> None:
    event.wait()


@pytest.mark.parametrize("function", [for_others, plainly])
def test_a_thread_in_a_marked_function_waits(function):
    event = threading.Event()
    thread = threading.Thread(target=function, args=(event,))
    thread.start()

    def stack() -> list[types.FrameType]:
        frame, frames = sys._current_frames()[thread.ident], []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return frames

    while not any(f.f_code is event.wait.__func__.__code__ for f in stack()):
        pass
    assert is_waiting(stack()[0]) is (function is for_others)
    event.set()
    thread.join()
    assert not is_waiting(None)
