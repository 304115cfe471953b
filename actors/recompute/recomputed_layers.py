"""Blocks that keep some activations and recompute or fetch the rest in the backward pass.

torch's selective checkpointing selects the outputs to keep by operator (matrix products,
attention), so this works for any model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from raymm.actors.modules.module_state import ForwardBuffers
from raymm.actors.quota.generators import seed_beside_torch
from raymm.actors.recompute.offloaded_activations import OffloadedBlocks
from raymm.kernels.flash.operator import ATTENTION as ATTENTION_OPERATOR
from raymm.kernels.shared_draws import same_draws
from raymm.scheduler.costs.recomputation import ATTENTION, KEEP, MATMULS, OFFLOAD, OPTIONS

_aten = torch.ops.aten
_ATTENTION = (ATTENTION_OPERATOR,) + tuple(
    getattr(_aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(_aten, name)
)
_MATMULS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)
_KEPT = {MATMULS: frozenset(_ATTENTION + _MATMULS), ATTENTION: frozenset(_ATTENTION)}


def recompute_layers(blocks: Sequence[nn.Module], options: Sequence[str]) -> None:
    """Apply recomputation options to blocks, in place, for forwards that record gradients.

    Results do not change: the same operators run again with the same inputs and random numbers.
    ``options`` has one of :data:`raymm.scheduler.costs.recomputation.OPTIONS` per block, in order.

    Raises:
        ValueError: an option is unknown, or there is not one per block.
    """
    if len(blocks) != len(options):
        raise ValueError(f"{len(options)} options for {len(blocks)} blocks")
    offloaded = OffloadedBlocks()
    for block, option in zip(blocks, options, strict=True):
        if option not in OPTIONS:
            raise ValueError(f"a layer's option is {option!r}; accepted: {', '.join(OPTIONS)}")
        if option == OFFLOAD:
            block.forward = offloaded.wrap(block.forward)
        elif option != KEEP:
            block.forward = partial(_run, block.forward, option, ForwardBuffers(block))


@contextmanager
def layers_recomputed(blocks: Sequence[nn.Module], options: Sequence[str]) -> Iterator[None]:
    """Context manager that applies :func:`recompute_layers` and restores the blocks."""
    forwards = [vars(block).get("forward") for block in blocks]
    recompute_layers(blocks, options)
    try:
        yield
    finally:
        for block, forward in zip(blocks, forwards, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward


def _run(
    forward: Callable[..., Any], option: str, buffers: ForwardBuffers, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    operators = _KEPT.get(option)
    selective = {} if operators is None else {"context_fn": partial(_contexts, operators)}
    repeatable = _repeatable(forward, buffers)
    return checkpoint(repeatable, *args, use_reentrant=False, **selective, **kwargs)


def _repeatable(forward: Callable[..., Any], buffers: ForwardBuffers) -> Callable[..., Any]:
    """Return a forward that computes the same when it is called again.

    Checkpointing restores only torch's generators; those of numpy and Python are reseeded here.
    """
    calls, buffer_values, forward = count(), [], same_draws(forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        if next(calls):
            seed_beside_torch(torch.initial_seed())
            with buffers.restored(buffer_values):
                return forward(*args, **kwargs)
        with buffers.recorded() as recorded:
            output = forward(*args, **kwargs)
        buffer_values.extend(recorded)
        return output

    return run


def _contexts(kept: frozenset[Any]) -> Any:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in kept and not _drops_out(operator, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _drops_out(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an attention draws dropout; keeping its output would change all later draws.
    """
    for index, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            rate = args[index] if index < len(args) else kwargs.get(argument.name, 0.0)
            return rate > 0.0
    return False
