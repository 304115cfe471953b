"""Copies of many tensors through pinned memory, on a stream with delayed work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymm.actors.optimizer import host_staging
from raymm.actors.optimizer.checkpoint_shards import HostCopy, Saved
from raymm.actors.optimizer.host_staging import ALIGNMENT, HostStaging, staging_bytes
from raymm.actors.optimizer.optimizer import Progress
from raymm.actors.rank.rank_actor import RankActor

GPU = torch.device("cuda", 0)
CHUNK = 4 * ALIGNMENT
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float64)


class Stream:
    """Stream whose work is done when an event of it is waited for."""

    def __init__(self, name: str) -> None:
        self.name, self.device, self.due = name, GPU, list[Callable[[], Any]]()
        self.lock = threading.RLock()

    def synchronize(self) -> None:
        with self.lock:
            while self.due:
                self.due.pop(0)()

    def wait_stream(self, other: Stream) -> None:
        self.due.append(other.synchronize)

    def record_event(self) -> Any:
        return SimpleNamespace(synchronize=self.synchronize)

    def wait_event(self, event: Any) -> None:
        self.due.append(event.synchronize)


class Cuda:
    """``torch.cuda`` of a device whose tensors are in host memory.

    Attributes:
        main: stream of the training thread.
        registered: pinned bytes, by address.
        most: limit of pinned bytes.
    """

    def __init__(self) -> None:
        self.main, self.most = Stream("main"), 2**20
        self._current = threading.local()
        self.registered: dict[int, int] = {}

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        return Stream("side")

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return getattr(self._current, "stream", self.main)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._current.stream = stream
        yield
        self._current.stream = self.main

    def cudart(self) -> Any:
        def register(address: int, nbytes: int, flags: int) -> int:
            self.registered[address] = nbytes
            return 2 if nbytes > self.most else 0  # cudaErrorMemoryAllocation

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=self.registered.pop)


@contextmanager
def pretended(chunk: int = CHUNK) -> Iterator[Cuda]:
    """Simulate a device with delayed asynchronous copies."""
    cuda, copy_ = Cuda(), torch.Tensor.copy_

    def late(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        if not non_blocking:
            return copy_(target, source)
        cuda.current_stream().due.append(lambda: copy_(target, source))
        return target

    with (
        patch.object(torch, "cuda", cuda),
        patch.object(torch.Tensor, "copy_", late),
        patch.object(host_staging, "CHUNK_BYTES", chunk),
    ):
        yield cuda


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw scalars, empty tensors, transposed ones, views, and tensors larger than a chunk."""
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    whole = torch.randint(0, 100, [*shape, 2], generator=seed).to(draw(st.sampled_from(DTYPES)))
    part = whole[..., 0]
    return part.transpose(0, 1) if len(shape) > 1 and draw(st.booleans()) else part


@given(st.lists(st.lists(tensors(), max_size=6), max_size=4))
def test_copies_have_the_values_of_their_request(rounds) -> None:
    with pretended() as cuda:
        staging, most = HostStaging(GPU), 0
        for originals in rounds:
            expected = [tensor.clone() for tensor in originals]
            copied = staging.copy(originals)
            staging.wait()
            for tensor in originals:  # the optimizer's step, once its stream has waited
                cuda.main.due.append(lambda tensor=tensor: tensor.zero_())
            cuda.main.synchronize()
            copies = copied.result(10)
            assert all(map(torch.equal, copies, expected))
            assert all(copy.is_contiguous() for copy in copies)
            aligned = sum(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in originals)
            most = max(most, min(aligned, 2 * CHUNK))
            assert sum(cuda.registered.values()) == staging.pinned_bytes <= most
        assert most <= staging.pinned_bytes + ALIGNMENT


def test_the_training_thread_does_not_wait_for_copies() -> None:
    """Check also copies larger than the pinned memory."""
    with pretended() as cuda:
        may = threading.Event()
        cuda.main.due.append(lambda: may.wait(10))  # the previous step
        copied = HostStaging(GPU).copy([torch.ones(10 * CHUNK)])
        assert not copied.done()
        may.set()
        assert torch.equal(copied.result(10)[0], torch.ones(10 * CHUNK))


def test_checkpoints_and_snapshots_share_the_pinned_memory() -> None:
    with pretended() as cuda:
        staging = HostStaging(GPU)
        files = {
            file: {f"{n}": torch.full((5, 13), float(n)) for n in range(9)} for file in ("a", "b")
        }
        copies = HostCopy(staging)
        for _ in range(2):
            assert copies.copy(Saved(files)) == 18 * 5 * 13 * 4
            snapshot = staging.copy([torch.ones(100)])
            assert snapshot.result(10)[0].sum() == 100
            (nbytes,) = cuda.registered.values()
            assert nbytes == staging_bytes(18 * (5 * 13 * 4)) == 2 * CHUNK
            held = copies._tensors.result(10)
            named = [tensor for part in files.values() for tensor in part.values()]
            assert all(map(torch.equal, held, named))


def test_temporary_tensors_are_copied_before_the_step_begins() -> None:
    with pretended():
        assert HostStaging(GPU).copy([torch.ones(CHUNK)], temporary=True).done()


def test_memory_that_cannot_be_pinned_is_named_with_its_size() -> None:
    with pretended(2**20), pytest.raises(MemoryError, match=r"pin 2 MiB .*snapshot_every: null"):
        HostStaging(GPU).copy([torch.ones(2**20)])


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("_step", "step"),
        ("show_averages", "show_averages"),
        ("hide_averages", "hide_averages"),
        ("leave", "hide_averages"),
    ],
)
def test_tensors_do_not_change_before_copies_have_read_them(method: str, change: str) -> None:
    actor: Any = MagicMock(_device=torch.device("cpu"))
    log: list[str] = []
    actor._staging.wait.side_effect = lambda: log.append("wait")
    getattr(actor._optimizer, change).side_effect = lambda: log.append(change)
    getattr(RankActor, method)(actor)
    assert log == ["wait", change]


def test_a_failed_copy_leaves_no_wait() -> None:
    with pretended() as cuda:
        staging = HostStaging(GPU)
        cuda.main.due.append(lambda: 1 / 0)
        copied = staging.copy([torch.ones(3 * CHUNK)])
        with pytest.raises(ZeroDivisionError):
            copied.result(10)
        staging.wait()


def test_delivery_does_not_wait_for_a_failed_copy(monkeypatch):
    """Check that it does not deliver the next copy instead, which would be one step off."""
    taken = []

    def copy_of(stages, optimizer, staging):
        taken.append(step := len(taken) + 1)
        if step == 2:
            raise MemoryError

        def result():
            if step == 3:  # in the copying thread
                raise MemoryError
            return host_staging.Snapshot(Progress(step, True), {}, {})

        return result

    monkeypatch.setattr(host_staging, "copy_of", copy_of)
    actor = host_staging.SnapshotActor()
    actor._stages, actor._optimizer, actor._staging = {}, None, None
    handed = []
    for step in (1, 2, 3, 4):
        if step == 2:
            with pytest.raises(MemoryError):
                actor.copy_snapshot()
        else:
            actor.copy_snapshot()
        handed.append(actor.hand_over_snapshot()[0])
    assert handed == [1, None, None, 4]
