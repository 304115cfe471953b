"""Inputs of a step: pinned in a thread, and copied per microbatch on a separate stream."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raymm.actors.memory import to_device
from raymm.actors.memory.to_device import step_inputs
from raymm.kernels import host_copies

GPU = torch.device("cuda", 0)


class Stream:
    """Stream that logs the issued operations."""

    def __init__(self, name: str, log: list[tuple]) -> None:
        self.device, self.name, self.log = GPU, name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, "waits for", other.name))

    def record_event(self) -> tuple:
        return self.log[-1]

    def wait_event(self, event: tuple) -> None:
        self.log.append((self.name, "waits for", event))


@pytest.fixture
def log(monkeypatch) -> list[tuple]:
    """Log all operations in order. Tensors stay in host memory."""
    log: list[tuple] = []
    main, side = Stream("main", log), Stream("side", log)
    current = [main]

    @contextmanager
    def stream(entered: Stream):
        current.append(entered)
        yield
        current.pop()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        in_thread = threading.current_thread() is not threading.main_thread()
        log.append(("pin", int(tensor[0]), in_thread))
        return tensor.clone()

    def copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        log.append(("copy", int(tensor[0]), current[-1].name))
        return tensor.clone()

    cuda: Any = SimpleNamespace(stream=stream, current_stream=lambda device: current[-1])
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(to_device, "_copy_stream", lambda device: side)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    monkeypatch.setattr(host_copies, "to_device", copy)
    return log


def row(number: int) -> dict[str, Any]:
    return {"x": torch.full((3,), number), "more": {"y": torch.full((2,), number)}, "z": number}


def test_inputs_are_pinned_in_a_thread_in_the_order_of_use(log) -> None:
    rows = {"vision": [row(0), row(10)], "llm": [row(1), None, row(21)]}
    step_inputs(rows, GPU)
    to_device.PINNING.submit(int).result()  # after all others
    assert log[0] == ("side", "waits for", "main")
    assert log[1:] == [("pin", n, True) for n in (0, 0, 1, 1, 10, 10, 21, 21)]


def test_a_microbatch_is_copied_before_its_first_use(log) -> None:
    rows: Any = step_inputs({"vision": [row(0), row(10), row(20), None]}, GPU)["vision"]
    to_device.PINNING.submit(int).result()
    log.clear()
    assert len(rows) == 4 and not log
    first = rows[0]
    due = [("copy", 0, "side")] * 2
    assert log == [*due, ("main", "waits for", due[-1]), *[("copy", 10, "side")] * 2]
    log.clear()
    assert first is rows[0] and not log  # a recomputation reads the same tensors
    assert [int(rows[1]["more"]["y"][0]), rows[1]["z"]] == [10, 10]
    assert log == [("main", "waits for", ("copy", 10, "side")), *[("copy", 20, "side")] * 2]
    assert rows[3] is None


def test_the_host_keeps_its_inputs(log) -> None:
    given = row(4)
    rows: Any = step_inputs({"llm": [given]}, GPU)["llm"]
    copy = rows[0]["x"]
    assert getattr(copy, host_copies._COPY)[0] is given["x"]


def test_a_pin_that_fails_fails_the_step(log, monkeypatch) -> None:
    def pin(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    (rows,) = step_inputs({"llm": [row(4)]}, GPU).values()
    with pytest.raises(RuntimeError, match="no pinned memory"):
        rows[0]
