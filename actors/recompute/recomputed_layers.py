"""Blocks that keep some activations and recompute or fetch the rest in the backward pass.

torch's selective checkpointing selects the outputs to keep by operator (matrix products,
attention), so this works for any model. Offloaded activations are copied to host memory while later
blocks compute, and fetched one block ahead of the backward pass. On GPUs, copies use separate
streams and pinned memory. On a CPU they are only useful for tests.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from raymm.actors.modules.module_state import ForwardBuffers
from raymm.actors.quota.generators import seed_beside_torch
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
SMALLEST_BYTES = 1 << 16
"""Smaller storages stay on the device: starting a copy takes longer than it would save."""
# If a saved tensor is a smaller share of its storage, the storage is in use for other reasons.
_LEAST_SHARE = 0.25


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


class OffloadedBlocks:
    """Offloading blocks of a stage; tracks which block the backward pass reaches next."""

    def __init__(self, smallest_bytes: int = SMALLEST_BYTES) -> None:
        self._smallest = smallest_bytes
        self._count = 0
        self._last: weakref.ref[_Block] | None = None
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a block's forward that offloads saved tensors; call it for blocks in order."""
        first, self._count = self._count == 0, self._count + 1

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            # The block before a microbatch's first one belongs to another microbatch.
            block = _Block(self, None if first or self._last is None else self._last)
            self._last = weakref.ref(block)
            with torch.autograd.graph.saved_tensors_hooks(block.pack, block.unpack):
                return forward(*args, **kwargs)

        return run

    def moves(self, tensor: torch.Tensor) -> bool:
        """Return True if a saved tensor is an activation large enough to offload."""
        if tensor.layout != torch.strided or _is_parameter(tensor):
            return False
        size = tensor.untyped_storage().nbytes()
        covered = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        used = (covered + 1) * tensor.element_size() if tensor.numel() else 0
        return size >= self._smallest and used >= _LEAST_SHARE * size

    def streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Return the streams for copies to the host and back."""
        if self._streams is None:
            self._streams = torch.cuda.Stream(), torch.cuda.Stream()
        return self._streams


def _is_parameter(tensor: torch.Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    return isinstance(base, nn.Parameter) or tensor.is_leaf and tensor.requires_grad


class _Block:
    """Saved tensors of one call of a block."""

    def __init__(
        self, blocks: OffloadedBlocks, before: weakref.ref[_Block] | None
    ) -> None:
        self._blocks, self._before = blocks, before
        # Views of one storage are copied once. The weak reference detects reuse of an address.
        self._by_address: dict[int, tuple[StorageWeakRef, weakref.ref[_Moved]]] = {}
        self._moved: weakref.WeakSet[_Moved] = weakref.WeakSet()

    def pack(self, tensor: torch.Tensor) -> Any:
        if not self._blocks.moves(tensor):
            return tensor
        storage = tensor.untyped_storage()
        entry = self._by_address.get(storage.data_ptr())
        moved = entry[1]() if entry is not None and not entry[0].expired() else None
        if moved is None:
            moved = _Moved(storage, self._blocks)
            self._moved.add(moved)
            self._by_address[storage.data_ptr()] = StorageWeakRef(storage), weakref.ref(moved)
        return moved, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        self.fetch()
        previous = self._before and self._before()
        if previous is not None:
            previous.fetch()
        moved, dtype, shape, stride, offset = packed
        return moved.back().view(dtype).as_strided(shape, stride, offset)

    def fetch(self) -> None:
        """Start to fetch all saved tensors, unless already done."""
        for moved in list(self._moved):
            moved.fetch()
        self._moved.clear()


class _Moved:
    """A storage's bytes in host memory, and on the device again once fetched."""

    def __init__(self, storage: torch.UntypedStorage, blocks: OffloadedBlocks) -> None:
        self._blocks, self._device = blocks, storage.device
        self._back: torch.Tensor | None = None
        self._left: torch.cuda.Event | None = None
        self._arrived: torch.cuda.Event | None = None
        data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if self._device.type != "cuda":
            self._host = data.clone()
            return
        out, _ = self._blocks.streams()
        out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(out):
            self._host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
            self._host.copy_(data, non_blocking=True)
            self._left = cast(torch.cuda.Event, out.record_event())
        data.record_stream(out)

    def fetch(self) -> None:
        """Start the copy to the device."""
        if self._back is not None:
            return
        if self._device.type != "cuda":
            self._back = self._host.clone()
            return
        _, stream = self._blocks.streams()
        assert self._left is not None
        stream.wait_event(self._left)  # waits for this copy only
        with torch.cuda.stream(stream):
            self._back = self._host.to(self._device, non_blocking=True)
            self._arrived = cast(torch.cuda.Event, stream.record_event())

    def back(self) -> torch.Tensor:
        """Return the bytes on the device, ready for the current stream."""
        self.fetch()
        assert self._back is not None
        if self._arrived is not None:
            current = torch.cuda.current_stream()
            current.wait_event(self._arrived)
            self._back.record_stream(current)
        return self._back
