"""Channels between groups of processes over gloo.

Every byte of a tensor is sent once, side tensors once to each receiver, and sums are exact.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from raymm.actors.executor.channels import Link, RecvChannel, SendChannel
from raymm.actors.modules.message import Message
from raymm.scheduler.plan.resharding import Resharding
from tests.support.fork_server import run_processes
from tests.support.same_messages import check_equal

TIMEOUT = timedelta(seconds=60)
CPU = torch.device("cpu")
PROCESSES = 5
# (senders that shard tokens, those that shard parameters, receivers)
DEGREES = [(1, 1, 4), (1, 4, 1), (1, 2, 3), (2, 1, 1), (2, 1, 2), (2, 2, 1), (3, 1, 2)]


def messages() -> list[tuple[str, Message]]:
    """Return sizes that do not divide, fewer elements than processes, none, side tensors."""
    g = torch.Generator().manual_seed(0)
    long = Message((torch.randn(7, 5, generator=g), torch.randn(3, generator=g).bfloat16()), {})
    side = Message(
        (torch.randn(1, 1, generator=g),),
        {"mask": torch.tensor([True, False, True]), "labels": torch.tensor([[5, -100, 7]])},
    )
    empty = Message((torch.zeros(0, 8), torch.randn(2, generator=g)), {})
    return [("long", long), ("side", side), ("empty", empty), ("long", long), ("side", side)]


def _group(ranks: list[int]) -> dist.ProcessGroup | None:
    group = dist.new_group(ranks, timeout=TIMEOUT)
    return group if len(ranks) > 1 and dist.get_rank() in ranks else None


def _run(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES, timeout=TIMEOUT
    )
    for tokens, tensors, receivers in DEGREES:
        _whole_messages(rank, tokens * tensors, receivers)
        _summed_gradients(rank, tokens, tensors, receivers)
    dist.barrier()
    dist.destroy_process_group()


def _links(rank: int, resharding: Resharding) -> dict[int, Link]:
    """Return links; the first processes are senders, the following ones receivers."""
    links = {}
    for sender, receiver in resharding.links():
        ends = sender, resharding.senders + receiver
        group = dist.new_group(list(ends), timeout=TIMEOUT)
        if rank == ends[0]:
            links[receiver] = Link(group, ends[1])
        elif rank == ends[1]:
            links[sender] = Link(group, ends[0])
    return links


def _whole_messages(rank: int, senders: int, receivers: int) -> None:
    resharding = Resharding(senders, receivers)
    links = _links(rank, resharding)
    gathered = _group(list(range(senders, senders + receivers)))
    sent = messages()
    payload = 0
    if rank < senders:
        channel = SendChannel(links, CPU, resharding, rank)
        channel.expect([key for key, _ in sent])
        for _, message in sent:
            channel.send(message)
        payload = channel.sent_bytes
        channel.end_step(TIMEOUT)
        dist.barrier()
        channel.end_step(TIMEOUT)
    else:
        if rank < senders + receivers:
            channel = RecvChannel(links, CPU, TIMEOUT, resharding, gathered)
            channel.expect([key for key, _ in sent])
            for key, due in sent:
                check_equal(key, channel.recv(), due)
        dist.barrier()
    total = torch.tensor(payload)
    dist.all_reduce(total)
    once = sum(t.nbytes for _, m in sent for t in m.tensors)
    to_each = sum(t.nbytes for _, m in sent for t in m.side.values())
    assert int(total) == once + receivers * to_each, (senders, receivers)


def _summed_gradients(rank: int, tokens: int, tensors: int, receivers: int) -> None:
    """Check sums of gradients.

    Processes that shard tokens have parts of the gradient, those that shard parameters the same;
    process ``(c, t)`` has number ``c * tensors + t``.
    """
    senders = tokens * tensors
    resharding = Resharding(senders, receivers)
    links = _links(rank, resharding)
    gathered = _group(list(range(senders, senders + receivers)))
    summed = None
    for t in range(tensors):
        ranks = [c * tensors + t for c in range(tokens)]
        group = _group(ranks)
        summed = group if rank in ranks and group is not None else summed

    def part(c: int) -> tuple[torch.Tensor, ...]:
        g = torch.Generator().manual_seed(c)
        return tuple(torch.randn(*shape, generator=g) for shape in ((7, 5), (1,), (0, 3)))

    if rank < senders:
        channel = SendChannel(links, CPU, resharding, rank, summed)
        mine = part(rank // tensors)
        kept = [tensor.clone() for tensor in mine]
        channel.expect(["gradient"] * 2)
        for _ in range(2):
            channel.send(Message(mine, {}))
        assert all(map(torch.equal, mine, kept))
        assert channel.sent_bytes * senders <= 2 * 4 * (36 + 2 * resharding.units)
        dist.barrier()
        channel.end_step(TIMEOUT)
        channel.end_step(TIMEOUT)
    else:
        if rank < senders + receivers:
            channel = RecvChannel(links, CPU, TIMEOUT, resharding, gathered)
            due = [sum(parts) for parts in zip(*map(part, range(tokens)), strict=True)]
            channel.expect(["gradient"] * 2)
            for _ in range(2):
                for mine, wanted in zip(channel.recv().tensors, due, strict=True):
                    torch.testing.assert_close(mine, wanted)
        dist.barrier()


@pytest.mark.parametrize("work", [_run])
def test_groups_of_processes(work, tmp_path):
    """Fail if an assertion in any process fails."""
    run_processes(work, (str(tmp_path / "store"),), PROCESSES)
