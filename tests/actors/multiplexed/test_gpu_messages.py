"""Batches of messages between two processes: every tensor gets what was sent for it, and small
ones travel together."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
from fork_server import run_processes

from raymm.actors.multiplexed import messages
from raymm.actors.multiplexed.messages import Messages

SHAPES = [((3, 2), "float32"), ((4,), "int64"), ((0, 5), "float32"), ((2, 3), "float32"),
          ((5,), "uint8"), ((1, 7), "int64")]  # fmt: skip


def tensors(rank: int) -> list[torch.Tensor]:
    return [
        (torch.arange(100 * i, 100 * i + torch.Size(shape).numel()) + 10 * rank).view(shape)
        .to(getattr(torch, dtype))
        for i, (shape, dtype) in enumerate(SHAPES)
    ]


def exchange(rank: int, folder: str, packed: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    messages.PACKED_BYTES = packed
    here, peer = Messages(dist.group.WORLD), 1 - rank
    mine, theirs = tensors(rank), [torch.full_like(t, 77) for t in tensors(peer)]
    works = here.start([(peer, t) for t in mine], [(peer, t) for t in theirs])
    assert [bool(one) for one in works] == [t.numel() > 0 for t in theirs]
    assert len({id(w) for one in works for w in one}) == (3 if packed else 5)
    for one in works:
        for work in one:
            work.wait()
    here.wait_sent()
    for found, due in zip(theirs, tensors(peer), strict=True):
        assert torch.equal(found, due)
    assert here.sent_bytes == sum(t.nbytes for t in mine)
    assert here.start([], []) == []
    dist.destroy_process_group()


@pytest.mark.parametrize("packed", [0, 2**20])
def test_all_tensors_arrive(packed):
    with tempfile.TemporaryDirectory() as folder:
        run_processes(exchange, (folder, packed), 2)
