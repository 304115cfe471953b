"""Channels between two processes over gloo."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from raymm.actors.executor.channels import Link, RecvChannel, SendChannel
from raymm.actors.executor.layouts import MOST_LAYOUTS
from raymm.actors.faults.task_tracker import reporting_lost_processes
from raymm.actors.modules.message import Message
from raymm.errors import ChannelError, InternalError
from raymm.kernels.collectives.waiting import wait
from tests.support.fork_server import run_processes
from tests.support.same_messages import check_equal

TIMEOUT = timedelta(seconds=20)
CPU = torch.device("cpu")


def messages() -> list[tuple[str, Message]]:
    """Return (key, message) pairs.

    Side tensors whose bytes end at odd offsets, empty tensors, several tensors, a layout that
    returns after another one.
    """
    g = torch.Generator().manual_seed(0)
    plain = Message((torch.randn(3, 5, generator=g),), {})
    side = Message(
        (torch.randn(2, 4, generator=g), torch.randn(7, generator=g).bfloat16()),
        {
            "mask": torch.tensor([True, False, True]),  # 3 bytes: the following data are unaligned
            "labels": torch.tensor([[5, -100, 7]]),
            "scale": torch.tensor(2.5),
            "bytes": torch.arange(5, dtype=torch.uint8),
            "half": torch.randn(3, generator=g).bfloat16(),
        },
    )
    empty = Message(
        (torch.zeros(0, 8), torch.randn(2, generator=g)),
        {"none": torch.zeros(0, dtype=torch.int64), "one": torch.tensor([9], dtype=torch.int32)},
    )
    nothing = Message((torch.zeros(0, 8),), {})
    again = Message((torch.randn(3, 5, generator=g),), {})
    transposed = Message((torch.randn(5, 3, generator=g).T,), {"mask": side.side["labels"].T})
    return [
        ("plain", plain), ("side", side), ("empty", empty), ("nothing", nothing),
        ("plain", again), ("transposed", transposed), ("side", side), ("plain", plain),
    ]


def _join(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def _exchange(rank: int, store: str) -> None:
    _join(rank, store)
    sent = messages()
    if rank == 0:
        channel = SendChannel({0: Link(dist.group.WORLD, 1)}, CPU)
        channel.expect([key for key, _ in sent])
        for _, message in sent:
            channel.send(message)
        assert channel.held > 0
        channel.end_step(TIMEOUT)
        assert channel.held > 0  # a tensor must live until its send completed
        channel.end_step(TIMEOUT)
        assert channel.held == 0  # and not longer
        channel.expect(["plain", "side"])
        with pytest.raises(ChannelError, match="metadata 'plain' had the layout.*now has"):
            channel.send(Message((torch.zeros(3, 6),), {}))
        with pytest.raises(ChannelError, match="metadata 'side'"):
            channel.send(Message(sent[1][1].tensors, {}))
    else:
        channel = RecvChannel({0: Link(dist.group.WORLD, 0)}, CPU, TIMEOUT)
        channel.expect([key for key, _ in sent])
        received = [channel.recv() for _ in sent]
        for (key, due), got in zip(sent, received, strict=True):
            check_equal(key, got, due)
    dist.barrier()
    dist.destroy_process_group()


def _peer_leaves(rank: int, store: str) -> None:
    _join(rank, store)
    group = dist.new_group([0, 1])
    dist.barrier()
    if rank == 1:
        channel = RecvChannel({0: Link(group, 0)}, CPU, timedelta(seconds=10))
        channel.expect(["never"])
        with pytest.raises(ChannelError, match="no message from rank 0"):
            channel.recv()


def _bounded(rank: int, store: str) -> None:
    """Check that a fast sender keeps at most the bound, and forgets layouts like its peer."""
    _join(rank, store)
    count, bound, per_step = MOST_LAYOUTS + 40, 4, 89
    sizes = [1 + n % (MOST_LAYOUTS + 20) for n in range(count)]
    sizes += sizes[:3] + sizes[-3:]  # forgotten, and not
    steps = [sizes[start : start + per_step] for start in range(0, len(sizes), per_step)]
    sender = SendChannel({0: Link(dist.group.WORLD, 1)}, CPU)
    receiver = RecvChannel({0: Link(dist.group.WORLD, 0)}, CPU, TIMEOUT)
    for step in steps:
        if rank == 0:
            sender.expect(step, bound)
            for size in step:
                sender.send(Message((torch.full((size,), float(size)),), {}))
                assert sender.held <= bound
        else:
            receiver.expect(step)
            for size in step:
                (received,) = receiver.recv().tensors
                assert received.shape == (size,) and bool((received == size).all())
    channel = sender if rank == 0 else receiver
    channel.expect([])
    assert len(channel._layouts) == MOST_LAYOUTS
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("work", [_exchange, _peer_leaves, _bounded])
def test_two_processes(work, tmp_path):
    """Fail if an assertion in either process fails."""
    run_processes(work, (str(tmp_path / "store"),), 2)


class Lost:
    """Operation whose peer is gone."""

    def wait(self):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")


@pytest.mark.parametrize("raised", [
    InternalError("module 'a' failed: RuntimeError: feature store: socket closed"),
    RuntimeError("gloo: socket closed, connection reset by peer: NCCL"),
])  # fmt: skip
def test_module_errors_do_not_count_as_lost_processes(raised):
    with pytest.raises(type(raised)) as caught, reporting_lost_processes(lambda: "a step"):
        raise raised
    assert caught.value is raised


def test_operation_errors_count_as_lost_processes():
    with pytest.raises(ChannelError, match="a step: Connection closed by peer"):
        with reporting_lost_processes(lambda: "a step"):
            wait(Lost())
    with pytest.raises(ChannelError, match="a step: no peer"):
        with reporting_lost_processes(lambda: "a step"):
            raise dist.DistNetworkError("no peer")
