"""Cut connections of a rank, and its continuation afterwards."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.devices.pretended_gpu.steps import CASES, RankProcess
from benchmarks.shared.tcp_rendezvous import TcpRendezvousStore
from raymm.actors.optimizer.optimizer import Progress
from raymm.actors.rank import rank_actor
from raymm.actors.rank.rank_actor import RankActor
from raymm.errors import ChannelError


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def rank(monkeypatch) -> Iterator[RankProcess]:
    """Return a rank whose process groups are gloo's and pretend to be NCCL's."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    yield RankProcess(CASES["fp32"], 0, free_port(), "cpu", {})
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_num_threads(threads)


def reconnect(rank: RankProcess, generation: int) -> None:
    store = TcpRendezvousStore(0, 1, free_port())
    store.generation = generation
    rank.actor._stores[generation] = store
    rank.actor.renew({}, generation)
    rank.load()


def test_only_connections_of_its_generation_are_cut() -> None:
    rank: Any = object.__new__(RankActor)
    counts = {"cut": 0}
    rank._changing, rank._generation = threading.Lock(), 1
    rank._own_connections = SimpleNamespace(cut=lambda: counts.update(cut=counts["cut"] + 1))
    rank.cut(0)
    assert counts["cut"] == 0 and not rank._failed
    rank.cut(1)
    assert counts["cut"] == 1 and rank._failed


def test_a_rank_reconnects_after_its_nccl_groups_are_aborted(rank: RankProcess) -> None:
    losses = [rank.step()[0]]
    for generation in (1, 2):
        rank.actor.cut(generation - 1)
        rank.actor.cut(generation - 1)  # the driver sends a second call before it reconnects
        assert not dist.is_initialized()
        assert rank.actor.leave() == Progress(generation, True)
        reconnect(rank, generation)
        losses.append(rank.step()[0])
    assert losses[0] > losses[1] > losses[2]


def test_a_step_whose_connections_are_aborted_does_not_count(
    rank: RankProcess, monkeypatch
) -> None:
    """Let the host run ahead, so that it raises no error after the abort."""
    optimizer: Any = rank.actor._optimizer

    def after(method: str, effect: Any) -> None:
        run = getattr(optimizer, method)
        monkeypatch.setattr(optimizer, method, lambda: (run(), effect()))

    def fails(message: str, steps: int, whole: bool, generation: int) -> None:
        with pytest.raises(ChannelError, match=message):
            rank.step()
        rank.actor.cut(generation - 1)
        assert rank.actor.leave() == Progress(steps, whole)
        monkeypatch.undo()
        monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
        reconnect(rank, generation)

    rank.step()
    after("step", lambda: rank.actor.cut(0))
    fails("connections were cut during the step", 1, False, 1)
    optimizer.load_state_tensors(optimizer.state_tensors(), 1)
    # NCCL's watchdog aborts before the driver has detected the failure.
    after("step", lambda: monkeypatch.setattr(rank_actor, "nccl_error", lambda: "COMM_ERROR"))
    fails("COMM_ERROR during the step", 1, False, 2)
    optimizer.load_state_tensors(optimizer.state_tensors(), 1)
    after("clip", wait_for_a_lost_rank)
    fails("a rank is lost", 1, True, 3)  # parameters are those after the first step
    rank.step()
    assert optimizer.progress == Progress(2, True)


def wait_for_a_lost_rank() -> None:
    raise ChannelError("a rank is lost")
