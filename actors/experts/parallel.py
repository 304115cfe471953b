"""Expert parallelism: a layer's experts are sharded over processes that share a microbatch.

Process p of P has experts [p s, (p + 1) s), s = ceil(E / P), like FSDP shards of dimension 0. Each
token is sent to the processes that have its experts, and the results are sent back. Experts'
parameters and gradients are never sent; an expert's gradient is complete where the expert is.

Counts are exchanged first, because a process may receive any number of tokens. With none, it still
takes part in both exchanges, forward and backward, and its experts get gradients of zero.

Legend: ``E`` experts, ``P`` processes, ``R`` tokens of this process, ``k`` experts per token, ``H``
hidden size, ``N`` received tokens, counted once per chosen local expert.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raymm.actors.experts.routing import expert_count
from raymm.actors.modules.precision import CAST_ONCE
from raymm.errors import ModelError
from raymm.kernels.collectives.exchange_rows import exchange_counts, exchange_rows

_COUNT = "num_experts"
_ARGUMENTS = 3  # tokens (R, H), experts (R, k), weights (R, k)


def share_of(count: int, processes: int) -> int:
    """Return the experts per process, ceil(E / P); the last processes may have fewer, or none."""
    return -(-count // processes)


def keep_experts(module: nn.Module, start: int, stop: int) -> None:
    """Reduce one of :func:`raymm.actors.experts.routing.experts`, in place, to experts [start,
    stop)."""
    for name, parameter in list(module.named_parameters()):
        local = nn.Parameter(parameter.detach()[start:stop].clone(), parameter.requires_grad)
        module.register_parameter(name, local)
    if hasattr(module, _COUNT):
        setattr(module, _COUNT, stop - start)


def share_experts(
    module: nn.Module, place: int, processes: int, group: dist.ProcessGroup, cast: bool = False
) -> None:
    """Shard a layer's experts, in place; then all processes must call the module together.

    Args:
        module: one of :func:`raymm.actors.experts.routing.experts`, with all experts.
        place: rank of this process in ``group``.
        processes: P.
        cast: compute with weights in autocast's dtype.
    """
    if cast:
        setattr(module, CAST_ONCE, True)
    count = expert_count(module)
    share = share_of(count, processes)
    keep_experts(module, min(share * place, count), min(share * (place + 1), count))
    forward = module.forward

    def exchanged(*args: Any, **kwargs: Any) -> torch.Tensor:
        hidden, chosen, weights = (*args, *kwargs.values())
        return _exchanged(module, forward, hidden, chosen, weights, (share, processes, group))

    module.forward = exchanged


def _exchanged(
    module: nn.Module, forward: Callable[..., torch.Tensor], hidden: torch.Tensor,
    chosen: torch.Tensor, weights: torch.Tensor, among: tuple[int, int, dist.ProcessGroup],
) -> torch.Tensor:  # fmt: skip
    share, processes, group = among
    flat = hidden.reshape(-1, hidden.shape[-1])
    experts, top_k = chosen.reshape(-1), chosen.shape[-1]
    order = experts.argsort(stable=True)  # by process, then by expert
    counts = torch.zeros(processes * share, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, experts, torch.ones_like(experts))
    arriving = exchange_counts(counts.view(processes, share), group)
    sent, received = counts.view(processes, share).sum(1).tolist(), arriving.sum(1).tolist()
    tokens = order // top_k
    # One message for both keeps the order of collectives equal everywhere; the wider dtype is
    # lossless.
    wide = torch.promote_types(flat.dtype, weights.dtype)
    rows = torch.cat(
        [flat[tokens].to(wide), weights.reshape(-1)[order][:, None].to(wide)], dim=1
    )
    arrivals = exchange_rows(rows, sent, received, group)
    arrived, row_weights = arrivals[:, :-1].to(flat.dtype), arrivals[:, -1:].to(weights.dtype)
    local = torch.arange(share, device=flat.device).repeat(processes)
    local = local.repeat_interleave(arriving.flatten())[:, None]
    outputs = _computed(module, forward, arrived, local, row_weights)
    returned = exchange_rows(outputs, received, sent, group)
    return torch.zeros_like(flat).index_add(0, tokens, returned).view(hidden.shape)


def _computed(
    module: nn.Module, forward: Callable[..., torch.Tensor], arrived: torch.Tensor,
    local: torch.Tensor, weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    if len(arrived):
        return forward(arrived, local, weights)
    # No token was received. Zero gradients keep the process in the backward's collectives, and make
    # the optimizer treat its experts like all others.
    empty = (arrived * weights).to(arrived.dtype)
    for parameter in module.parameters():
        empty = empty + parameter[:0].sum().to(empty.dtype)
    return empty


def check_experts(module: nn.Module) -> None:
    """Check on a few tokens that a layer's experts can be sharded: all at once and one by one.

    Raises:
        ModelError: the experts cannot be sharded; the message has the reason.
    """
    parameters = dict(module.named_parameters())
    counts = {len(parameter) if parameter.dim() else 0 for parameter in parameters.values()}
    declared = getattr(module, _COUNT, None)
    (count, *further) = sorted(counts) or [0]
    if further or (declared is not None and declared != count):
        shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in parameters.items())
        number = "the same number of" if declared is None else declared
        raise ModelError(
            f"its parameters do not all have {number} experts in dimension 0: {shapes}"
        )
    if list(module.buffers()) or any("." in name for name in parameters):
        raise ModelError("it has buffers, or submodules with parameters")
    required = [
        p for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    if required and len(required) != _ARGUMENTS:
        names = ", ".join(p.name for p in required)
        raise ModelError(f"it is called with {names}; accepted: tokens, experts, weights")
    _compare(module, count)


def _compare(module: nn.Module, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = copy.deepcopy(module).float()
    rows = 4 * count
    hidden = torch.randn(rows, _width(module), generator=generator)
    chosen = torch.arange(rows)[:, None] % count
    chosen = torch.cat([chosen, (chosen + 1) % count], dim=1) if count > 1 else chosen
    weights = torch.rand(chosen.shape, generator=generator)
    with torch.no_grad():
        expected = reference(hidden, chosen, weights)
        total = torch.zeros_like(expected)
        for expert in range(count):
            expert_module = copy.deepcopy(module).float()
            keep_experts(expert_module, expert, expert + 1)
            tokens, slots = (chosen == expert).nonzero(as_tuple=True)
            index = torch.zeros(len(tokens), 1, dtype=torch.int64)
            output = expert_module(hidden[tokens], index, weights[tokens, slots][:, None])
            total = total.index_add(0, tokens, output)
    if not torch.allclose(total, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())):
        raise ModelError("its experts give another result when each processes its tokens alone")


def _width(module: nn.Module) -> int:
    """Return the hidden size: the size that all experts' weights have in common."""
    sizes = [set(p.shape[1:]) for p in module.parameters() if p.dim() > 2]
    common = set.intersection(*sizes) if sizes else set()
    for name in ("hidden_dim", "hidden_size"):
        if getattr(module, name, None) in common:
            return getattr(module, name)
    if len(common) == 1:
        return common.pop()
    raise ModelError(f"the hidden size of its tokens is ambiguous: it is one of {sorted(common)}")
