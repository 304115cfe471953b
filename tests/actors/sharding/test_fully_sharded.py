"""Full weights that forwards of fully sharded stages keep until their backward.

The process group only pretends to have other members.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from raymm.actors.sharding.fully_sharded import fully_sharded_plan, shard_parameters
from tests.support.fork_server import run_processes

PROCESSES, BLOCKS, WIDTH = 4, 6, 64


class Stage(nn.Module):
    """Consecutive blocks; ``run`` is the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)])

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Run one microbatch."""
        return self.module(x)


def whole_weights(dtype: torch.dtype | None) -> int:
    """Return the bytes of full weights that live between a forward and its backward."""
    torch.manual_seed(0)
    stage = Stage()
    plan = fully_sharded_plan(stage.module, [str(n) for n in range(BLOCKS)], PROCESSES)
    group = dist.group.WORLD
    assert group is not None
    shard_parameters(stage, stage.module, plan, group, torch.device("cpu"), dtype)
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == WIDTH * WIDTH:
            storage = tensor.untyped_storage()
            held[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = stage.run(torch.randn(2, WIDTH))
    alive = {storage.data_ptr(): storage.nbytes() for storage in held.values()}
    out.sum().backward()
    for parameter in stage.parameters():
        assert parameter.dtype == torch.float32 and parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
    return sum(alive.values())


def _run(rank: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=PROCESSES)
    one = 2 * WIDTH * WIDTH
    exact, gathered = whole_weights(None), whole_weights(torch.bfloat16)
    # The root gathers the last block's first, so those may still exist.
    assert exact >= (BLOCKS - 1) * one, exact
    assert gathered <= one, gathered
    dist.destroy_process_group()


def test_blocks_gathered_in_compute_dtype_keep_no_copies():
    """Fail if an assertion in the process fails."""
    run_processes(_run, (), 1)
