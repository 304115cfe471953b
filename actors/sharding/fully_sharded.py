"""Parameters of a stage sharded over processes with torch's FSDP2.

Parameters are gathered per *unit*: a block, or a language model's embedding or head. A unit is
gathered when its forward or backward starts (the next one is prefetched) and freed when it ends.
Its gradients are reduce-scattered as soon as they are complete.

Parameters outside units (norms, tied embeddings, patch embeddings, projectors) are replicated, and
one process keeps the optimizer state of each (ZeRO-1). With expert parallelism, experts are not
gathered: tokens are sent to them (:mod:`raymm.actors.experts.parallel`).

FSDP's root is the stage with ``run`` as its forward, because the module's own forward may end early
(:class:`raymm.errors.ForwardLeft`). Hooks that replace the hidden state run before FSDP's.
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
    """Selection of the parameters of a module that are sharded; names are relative to the module.

    Attributes:
        lengths: length of each sharded parameter along its first dimension.
        units: names of the modules whose parameters are gathered together.
        experts: names of modules inside units that are not gathered; tokens are sent to them.
    """

    shards: int
    lengths: Mapping[str, int]
    units: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()

    def shard(self, parameter: str, place: int) -> ParameterShard | None:
        """Return a process's shard, possibly empty; None if it holds the full parameter."""
        length = self.lengths.get(parameter)
        if length is None:
            return None
        share = -(-length // self.shards)
        start, stop = (min(share * index, length) for index in (place, place + 1))
        return ParameterShard(0, ((start, stop),))

    def sharers(self, parameter: str, place: int) -> tuple[int, ...]:
        """Return the processes over which gradients of this process's shard are summed."""
        return (place,) if parameter in self.lengths else tuple(range(self.shards))

    def is_replica(self, parameter: str, place: int) -> bool:
        """Return True if an earlier process holds the same values."""
        return parameter not in self.lengths and place > 0

    def edges(self, parameter: str) -> tuple[int, ...] | None:
        """Return the ascending bounds of all processes' ranges; None for a replicated parameter."""
        length = self.lengths.get(parameter)
        if length is None:
            return None
        share = -(-length // self.shards)
        return tuple(sorted({min(share * index, length) for index in range(self.shards + 1)}))


def fully_sharded_plan(module: nn.Module, units: Sequence[str], shards: int) -> FullyShardedPlan:
    """Return the plan of a complete module or its skeleton, with the parameters of ``units``
    sharded.

    Scalars, and parameters that other units or the rest of the module use, too, are replicated.
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
    """Return the names of a language model's blocks, embedding and head."""
    ends = [input_embeddings(module), method_of(module, "get_output_embeddings")()]
    return [
        *block_units(module, blocks),
        *(name for name, child in module.named_modules() if any(child is end for end in ends)),
    ]


def block_units(module: nn.Module, blocks: str) -> list[str]:
    """Return the names of the entries of a list of blocks."""
    return [f"{blocks}.{number}" for number in range(len(block_list(module, blocks)))]


def shard_parameters(
    stage: nn.Module,
    module: nn.Module | None,
    plan: FullyShardedPlan,
    group: dist.ProcessGroup,
    device: torch.device,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Reduce a stage's parameters to this process's shard.

    From then on, all processes of the group must call ``stage.run`` together.

    Args:
        module: the stage's part of the planned module, if it has any.
        plan: plan of the complete module.
        compute_dtype: dtype in which units with matrix products (not an embedding) are gathered;
            shards and reductions are fp32. None: units are gathered unchanged, and autocast casts
            as usual.
    """
    mesh = DeviceMesh.from_group(group, device.type)
    low = compute_dtype is not None
    experts = set() if module is None else _share_experts(module, plan, group, low)
    named = {} if module is None else dict(module.named_parameters())
    ignored = (
        set(stage.parameters()) - {named[name] for name in plan.lengths if name in named} | experts
    )
    stage_units = {
        unit for unit in plan.units if any(name.startswith(f"{unit}.") for name in named)
    }
    units = [] if module is None else [
        module.get_submodule(unit) for unit in plan.units if unit in stage_units
    ]
    # The stage is the root, so that units prefetch the next one's parameters. The module cannot be
    # the root, because its forward may end early.
    if compute_dtype is not None:
        for unit in units:
            _norms_in_fp32(unit)
    for child in (*units, stage):
        hooks = cast(OrderedDict[int, Callable], child._forward_pre_hooks)
        earlier_hooks = set(hooks)
        sharded = fully_shard(
            child, mesh=mesh, reshard_after_forward=True, ignored_params=ignored,
            mp_policy=_policy(child, compute_dtype if child is not stage else None),
        )
        # Sums, not means; gloo does not support a reduction with a factor.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # Run after hooks that replace the hidden state: its gradient marks the end of the backward.
        for hook in set(hooks) - earlier_hooks:
            hooks.move_to_end(hook)
    register_fsdp_forward_method(stage, "run")


def _share_experts(
    module: nn.Module, plan: FullyShardedPlan, group: dist.ProcessGroup, low: bool
) -> set[nn.Parameter]:
    """Keep only this process's experts, used in autocast's dtype if ``low``; return their
    parameters."""
    present = dict(module.named_modules())
    layers = [present[name] for name in plan.experts if name in present]
    for layer in layers:
        share_experts(layer, dist.get_rank(group), plan.shards, group, low)
    return {parameter for layer in layers for parameter in layer.parameters()}


def _policy(unit: nn.Module, compute_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return a policy that does not cast inputs: autocast determines the residual stream's dtype.
    """
    if compute_dtype is None or not any(isinstance(m, CAST_BY_AUTOCAST) for m in unit.modules()):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _norms_in_fp32(unit: nn.Module) -> None:
    """Let torch's norms use fp32 weights, as autocast does on CUDA; the CPU rejects mixed dtypes.
    """
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
    """Return this process's shard of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
