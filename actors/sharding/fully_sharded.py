"""Parameters of a stage shared out over processes, by torch's FSDP2.

Each process keeps a part of every parameter along its first dimension. Parameters are gathered
*unit* by unit (a block; a language model's embedding or head): when the unit's forward or backward
begins, the next one's meanwhile, and let go when it ends. Gradients are summed and scattered, a
part to each process, as soon as a unit's backward made them. So a process holds whole parameters
and gradients of a unit or two at a time.

What is around the units (norms, tied embeddings, patch embeddings, projectors) stays whole on every
process. Its gradients are summed like those of copies, and one process keeps the optimizer's
state of each parameter (ZeRO-1).

Of a mixture of experts that is expert parallel, experts are not gathered: each process keeps the
same part of them, and tokens come to it (:mod:`raymm.actors.experts.parallel`).

The stage is FSDP's root with ``run`` as its forward, since the module's own forward may end in the
middle (:class:`raymm.errors.ForwardLeft`); hooks that replace the hidden state come
before FSDP's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from raymm.actors.experts.parallel import share_experts
from raymm.actors.modules.blocks import block_list, input_embeddings, method_of
from raymm.actors.modules.precision import CAST_BY_AUTOCAST
from raymm.actors.sharding.tensor_plan import ParameterShard

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class FullyShardedPlan:
    """Which parameters of a module are shared out. Names are the module's.

    Attributes:
        shards: over how many processes.
        lengths: per sharded parameter, how long it is along its first dimension.
        units: dotted names of the modules whose parameters are gathered together.
        experts: dotted names of modules within them whose parameters are not gathered: tokens go
            to their experts.
    """

    shards: int
    lengths: Mapping[str, int]
    units: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()

    def shard(self, parameter: str, place: int) -> ParameterShard | None:
        """What a process holds of a parameter, maybe nothing; None: all of it."""
        length = self.lengths.get(parameter)
        if length is None:
            return None
        share = -(-length // self.shards)
        start, stop = (min(share * at, length) for at in (place, place + 1))
        return ParameterShard(0, ((start, stop),))

    def sharers(self, parameter: str, place: int) -> tuple[int, ...]:
        """The processes whose gradients of this process's shard must be summed."""
        return (place,) if parameter in self.lengths else tuple(range(self.shards))

    def is_replica(self, parameter: str, place: int) -> bool:
        """Whether a process before this one holds the very same."""
        return parameter not in self.lengths and place > 0

    def edges(self, parameter: str) -> tuple[int, ...] | None:
        """Return where the ranges of all processes begin and end, ascending up to the parameter's
        length; None if every process holds all of it."""
        length = self.lengths.get(parameter)
        if length is None:
            return None
        share = -(-length // self.shards)
        return tuple(sorted({min(share * place, length) for place in range(self.shards + 1)}))


def fully_sharded_plan(module: nn.Module, units: Sequence[str], shards: int) -> FullyShardedPlan:
    """The plan of a whole module.

    Args:
        module: the whole module, or its skeleton.
        units: dotted names of its modules whose parameters are shared out. Parameters that other
            units or the rest of the module use too stay whole, and so do single numbers.
        shards: processes that share it.
    """
    users: dict[int, set[str]] = {}
    parameters = list(module.named_parameters(remove_duplicate=False))
    unit_of: dict[str, str] = {}
    for name, parameter in parameters:
        unit = next((prefix for prefix in units if name.startswith(f"{prefix}.")), "")
        unit_of[name] = unit
        users.setdefault(id(parameter), set()).add(unit)
    return FullyShardedPlan(
        shards,
        {
            name: parameter.shape[0]
            for name, parameter in parameters
            if unit_of[name] and parameter.dim() and len(users[id(parameter)]) == 1
        },
        tuple(units),
    )


def language_units(module: nn.Module, blocks: str) -> list[str]:
    """A language model's blocks, embedding and head."""
    ends = [input_embeddings(module), method_of(module, "get_output_embeddings")()]
    return [
        *block_units(module, blocks),
        *(name for name, part in module.named_modules() if any(part is end for end in ends)),
    ]


def block_units(module: nn.Module, blocks: str) -> list[str]:
    """The names of a list of blocks' entries."""
    return [f"{blocks}.{number}" for number in range(len(block_list(module, blocks)))]


def shard_parameters(
    stage: nn.Module,
    module: nn.Module | None,
    plan: FullyShardedPlan,
    group: dist.ProcessGroup,
    device: torch.device,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Give away all but this process's part of a stage's parameters.

    From then on ``stage.run`` must be called by all processes of the group together.

    Args:
        stage: what has ``run``.
        module: the stage's part of the planned module, if it has any.
        plan: of the whole module; the stage may be a part of it.
        group: the processes that share the parameters.
        device: where the shards are to be.
        compute_dtype: of units that compute matrix products (not an embedding): gathered in it, so
            that no forward keeps another copy for its backward, while shards and sums of gradients
            are fp32. None: units are gathered as they are, and autocast casts what it would.
    """
    mesh = DeviceMesh.from_group(group, device.type)
    low = compute_dtype is not None
    kept = set() if module is None else _share_experts(module, plan, group, low)
    own = {} if module is None else dict(module.named_parameters())
    whole = set(stage.parameters()) - {own[name] for name in plan.lengths if name in own} | kept
    own_units = {unit for unit in plan.units if any(name.startswith(f"{unit}.") for name in own)}
    units = [] if module is None else [
        module.get_submodule(unit) for unit in plan.units if unit in own_units
    ]
    # The stage is the root, so that each unit gathers the next one's parameters ahead. The module
    # cannot be: its forward may end in the middle.
    if compute_dtype is not None:
        for unit in units:
            _norms_in_fp32(unit)
    for child in (*units, stage):
        hooks = cast(OrderedDict[int, Callable], child._forward_pre_hooks)
        before = set(hooks)
        sharded = fully_shard(
            child, mesh=mesh, reshard_after_forward=True, ignored_params=whole,
            mp_policy=_policy(child, compute_dtype if child is not stage else None),
        )
        # Sums, not means; gloo knows no reduction with a factor.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # After hooks that replace the hidden state: backward is over when its gradient is there.
        for hook in set(hooks) - before:
            hooks.move_to_end(hook)
    register_fsdp_forward_method(stage, "run")


def _share_experts(
    module: nn.Module, plan: FullyShardedPlan, group: dist.ProcessGroup, low: bool
) -> set[nn.Parameter]:
    """Give away all but this process's experts, which compute in autocast's dtype if ``low``;
    returns their parameters."""
    present = dict(module.named_modules())
    of_layers = [present[name] for name in plan.experts if name in present]
    for of_layer in of_layers:
        share_experts(of_layer, dist.get_rank(group), plan.shards, group, low)
    return {parameter for of_layer in of_layers for parameter in of_layer.parameters()}


def _policy(unit: nn.Module, compute_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Not of inputs: the residual stream stays what autocast makes it."""
    if compute_dtype is None or not any(isinstance(m, CAST_BY_AUTOCAST) for m in unit.modules()):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _norms_in_fp32(unit: nn.Module) -> None:
    """Autocast on CUDA computes torch's norms in fp32; on a CPU they refuse weights of another
    dtype than their input's."""
    def show(norm: nn.Module, _: object) -> None:
        for name, parameter in norm._parameters.items():
            if parameter is not None:
                norm.__dict__[name] = parameter.float()

    def hide(norm: nn.Module, *_: object) -> None:
        for name in norm._parameters:
            norm.__dict__.pop(name, None)

    for child in unit.modules():
        if isinstance(child, _NORMS):
            child.register_forward_pre_hook(show)
            child.register_forward_hook(hide, always_call=True)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
