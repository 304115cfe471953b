"""Attention with any mask over tokens that are split over the ranks of a group.

Five methods give the same result (Cornstarch v2 §4.3; LV-XAttn §3):

- ``gather``: every rank gathers the keys and values of all others, a few heads at a time, and
  gathers the next heads during computation.
- ``needed``: like ``gather``, but only keys and values that the rank's rows see.
- ``ring``: keys and values visit every rank; outputs stay.
- ``ulysses``: during attention, heads are split over ranks instead of tokens.
- ``rotate``: queries, partial outputs and LSE visit every rank; keys and values stay. For cross
  attention with many more keys than queries.

Legend: ``B`` sequences, ``Hq`` query heads, ``Hk`` key heads, ``Tq`` and ``Tk`` tokens of this
rank, ``D`` head dim, ``n`` ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from raymm.kernels.context_parallel.call import ContextCall, Way
from raymm.kernels.context_parallel.methods import METHODS, WAYS
from raymm.kernels.flash.operands import prepare
from raymm.kernels.flash.operator import attention_operator
from raymm.kernels.mask.mask import as_masks


def context_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: ContextCall,
    *,
    method: str = "gather",
) -> torch.Tensor:
    """Compute attention of this rank's rows to the keys of all ranks.

    Args:
        query: (B, Hq, Tq, D), this rank's rows in ascending order of position.
        key, value: (B, Hk, Tk, D) and (B, Hk, Tk, Dv), this rank's keys. Under autocast all three
            are cast to its dtype.
        method: one of :data:`METHODS`.

    Returns:
        (B, Hq, Tq, Dv) in the dtype of the query.

    Raises:
        ModelError: the mask does not fit the layouts.
        ValueError: the method is unknown, tensors do not fit one another or the layout, or the
            number of heads is not divisible by the ranks (``ulysses``).
    """
    query, key, value = prepare(query, key, value, call.softcap)
    call = _checked(call, query, key, method)
    width, common = value.shape[3], max(key.shape[3], value.shape[3])
    # Keys and values are sent in one message. Padding with zeros changes no score and no column.
    query, key, value = (
        F.pad(each, (0, common - each.shape[3])) if each.shape[3] < common else each
        for each in (query, key, value)
    )
    return _ContextAttention.apply(query, key, value, call, WAYS[method])[..., :width]


def recomputed_context_attention(
    project: nn.Module,
    hidden: torch.Tensor,
    visual: torch.Tensor,
    call: ContextCall,
    *,
    method: str = "rotate",
    projected: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute cross attention without saving queries, keys and values: backward recomputes them
    from their inputs (LV-XAttn §3.3). All layers of a model share ``visual``, so only one copy of
    it is kept. The attention itself is not recomputed.

    Args:
        project: ``project(hidden, visual) -> (query, key, value)``, shaped as
            :func:`context_attention` takes them; must be deterministic.
        hidden, visual: this rank's rows and visual tokens. They and the parameters of ``project``
            get gradients if they require them.
        method: one of :data:`METHODS` except ``ulysses``, which saves exchanged heads instead of
            its inputs.
        projected: result of ``project`` for these inputs, if it was already called without
            autograd; the forward pass then does not call it again.

    Raises:
        ModelError, ValueError: as :func:`context_attention`.
    """
    if method == "ulysses":
        raise ValueError(
            "method 'ulysses' does not support recomputed attention; use one of "
            f"{', '.join(m for m in METHODS if m != 'ulysses')}"
        )
    parameters = [p for p in project.parameters() if p.requires_grad]
    inputs = project, projected, call, method
    return _RecomputedAttention.apply(hidden, visual, inputs, *parameters)


def current_autocast(device: str) -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that enters autocast with its current settings and an empty cache of
    cast weights. Some PyTorch versions reuse a weight that was cast without autograd, which then
    gets no gradient."""
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    @contextmanager
    def again() -> Iterator[None]:
        torch.clear_autocast_cache()
        try:
            with torch.autocast(device, dtype, enabled):
                yield
        finally:
            torch.clear_autocast_cache()

    return again


def _checked(
    call: ContextCall, query: torch.Tensor, key: torch.Tensor, method: str
) -> ContextCall:
    """Return the call with a mask per sequence and a scale."""
    group = call.group
    masks = as_masks(call.masks, query.shape[0], group.queries.length, group.keys.length)
    expected = group.queries.sizes[group.rank], group.keys.sizes[group.rank]
    if (query.shape[2], key.shape[2]) != expected:
        raise ValueError(
            f"rank {group.rank} has {query.shape[2]} rows and {key.shape[2]} keys, expected "
            f"{expected[0]} and {expected[1]} from its layout"
        )
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; expected one of {', '.join(METHODS)}")
    size = group.exchange.size
    if method == "ulysses" and (query.shape[1] % size or key.shape[1] % size):
        raise ValueError(
            f"ulysses splits heads over ranks: {query.shape[1]} query heads and {key.shape[1]} "
            f"key heads must be multiples of {size} ranks"
        )
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    return replace(call, masks=masks, scale=scale)


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, call: ContextCall, way: Way):
        if way.saves_inputs:
            def compute(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                out, saved = way.forward(call, *inputs)
                return out, saved[-1]

            out, lse = attention_operator(compute, query, key, value)
            saved = query, key, value, out, lse
        else:
            out, saved = way.forward(call, query, key, value)
        ctx.save_for_backward(*saved)
        ctx.call, ctx.way, ctx.dtype = call, way, query.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out):
        gradients = ctx.way.backward(ctx.call, grad_out, ctx.saved_tensors)
        return *(gradient.to(ctx.dtype) for gradient in gradients), None, None


class _RecomputedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, visual, inputs, *parameters):
        project, projected, call, method = inputs
        ctx.autocast = autocast = current_autocast(hidden.device.type)
        if projected is None:
            with autocast():
                projected = project(hidden, visual)
        query, key, value = prepare(*projected, softcap=call.softcap)
        if key.shape != value.shape:
            raise ValueError(
                f"keys and values are sent together and must have the same shape, got "
                f"{tuple(key.shape)} and {tuple(value.shape)}"
            )
        call = _checked(call, query, key, method)
        out, (*_, out, lse) = WAYS[method].forward(call, query, key, value)
        ctx.save_for_backward(hidden, visual, out, lse)
        ctx.project, ctx.parameters, ctx.call, ctx.way = project, parameters, call, WAYS[method]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out):
        hidden, visual, out, lse = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        inputs = [
            t.detach().requires_grad_(needed)
            for t, needed in zip((hidden, visual), needs, strict=True)
        ]
        with torch.enable_grad(), ctx.autocast():
            projected = prepare(*ctx.project(*inputs), softcap=ctx.call.softcap)
        saved = (*(t.detach() for t in projected), out, lse)
        gradients = ctx.way.backward(ctx.call, grad_out, saved)
        leaves = [t for t in (*inputs, *ctx.parameters) if t.requires_grad]
        pairs = [(t, g.to(t.dtype)) for t, g in zip(projected, gradients, strict=True)
                 if t.requires_grad]  # fmt: skip
        outputs, grads = zip(*pairs, strict=True)
        partials = iter(torch.autograd.grad(outputs, leaves, grads, allow_unused=True))
        input_grads = [next(partials) if needed else None for needed in needs]
        return *input_grads, None, *partials
