"""Parameters of a stage's blocks shared out over processes, by torch's FSDP2.

Each process keeps a part of every parameter along its first dimension. A block's parameters are
gathered when its forward or backward begins, the next block's meanwhile, and let go when it ends;
gradients are summed and scattered, a part to each, as soon as a block's backward made them. So a
process holds whole parameters and gradients of a block or two at a time.

Parameters around the blocks (embeddings, head, norms, projector) stay whole on every process.
Their gradients are summed like those of copies, and one process keeps the optimizer's state of
each (ZeRO-1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from raymm.actors.stages.tensor_plan import Piece


@dataclass(frozen=True)
class FullyShardedPlan:
    """Which parameters of a module are shared out. Names are the module's.

    Attributes:
        shards: over how many processes.
        lengths: per sharded parameter, how long it is along its first dimension.
    """

    shards: int
    lengths: Mapping[str, int]

    def piece(self, parameter: str, place: int) -> Piece | None:
        """What a process holds of a parameter, maybe nothing; None: all of it."""
        length = self.lengths.get(parameter)
        if length is None:
            return None
        share = -(-length // self.shards)
        start, stop = (min(share * at, length) for at in (place, place + 1))
        return Piece(0, ((start, stop),))

    def holders(self, parameter: str, place: int) -> tuple[int, ...]:
        """The processes whose gradients of this process's piece must be summed."""
        return (place,) if parameter in self.lengths else tuple(range(self.shards))

    def is_replica(self, parameter: str, place: int) -> bool:
        """Whether a process before this one holds the very same."""
        return parameter not in self.lengths and place > 0


def fully_sharded_plan(module: nn.Module, blocks: str, shards: int) -> FullyShardedPlan:
    """The plan of a whole module, whose list of blocks is ``blocks``. Parameters that other
    blocks or the rest of the module use too stay whole, and so do single numbers."""
    users: dict[int, set[str]] = {}
    parameters = list(module.named_parameters(remove_duplicate=False))
    prefix = f"{blocks}."
    for name, parameter in parameters:
        block = name.removeprefix(prefix).split(".")[0] if name.startswith(prefix) else ""
        users.setdefault(id(parameter), set()).add(block)
    return FullyShardedPlan(
        shards,
        {
            name: parameter.shape[0]
            for name, parameter in parameters
            if parameter.dim() and len(users[id(parameter)]) == 1 and name.startswith(prefix)
        },
    )


def shard_blocks(
    stage: nn.Module,
    module: nn.Module | None,
    blocks: Sequence[nn.Module],
    plan: FullyShardedPlan,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Give away all but this process's part of a stage's blocks.

    From then on ``stage.run`` must be called by all processes of the group together.

    Args:
        stage: what has ``run``.
        module: the stage's part of the planned module.
        blocks: those of its blocks that the stage runs.
        group: the processes that share the parameters.
    """
    mesh = DeviceMesh.from_group(group, device.type)
    whole = set(stage.parameters())
    if module is not None:
        whole -= {p for name, p in module.named_parameters() if name in plan.lengths}
    for one in (*blocks, stage):
        hooks = one._forward_pre_hooks
        before = set(hooks)
        fully_shard(one, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
        # Sums, not means; gloo knows no reduction with a factor.
        one.set_gradient_divide_factor(1.0)
        one.set_force_sum_reduction_for_comms(True)
        # After hooks that replace the hidden state: backward is over when its gradient is there.
        for hook in set(hooks) - before:
            hooks.move_to_end(hook)
    # The root of all blocks, so that each gathers the next one's parameters ahead. It is not the
    # module, whose forward may end in the middle.
    register_fsdp_forward_method(stage, "run")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
