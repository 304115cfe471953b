"""Start and end times of each layer of a module, and the bytes that it keeps for its backward."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from raymm.actors.memory.live_storages import LiveStorages
from raymm.actors.modules.blocks import hidden_name, hidden_state

# Owner number for storages of the module's output.
_HANDED_ON = -1


class LayerTrace:
    """Time marks and activation bytes of one forward and backward.

    Args:
        storages: tracks the bytes alive; None to measure time only.

    Attributes:
        held: bytes that each layer keeps for its backward.
        output_bytes: bytes of the hidden state that each layer returns.
        entering: shape of the hidden state that enters the first block.
    """

    def __init__(
        self, device: torch.device, layers: int, storages: LiveStorages | None = None
    ) -> None:
        self._cuda = device.type == "cuda"
        self._forward: dict[int, Any] = {}
        self._backward: dict[int, Any] = {}
        self._count = layers
        self._storages = storages
        self.held = [0] * layers
        self.output_bytes = [0] * layers
        self.output_shape: tuple[int, ...] = ()
        self.entering: tuple[int, ...] = ()

    @contextlib.contextmanager
    def watching(
        self, layers: Sequence[nn.Module], has_blocks: bool, leaf: bool
    ) -> Iterator[None]:
        """Hook the layers to record when each begins, for the length of the block.

        Args:
            layers: the first submodule of each layer.
            leaf: True to make the first layer's input a leaf of the autograd graph.
        """
        handles = []
        for index, module in enumerate(layers):
            def enter(layer: nn.Module, args: tuple, kwargs: dict, index: int = index) -> Any:
                return self._enter(layer, index, args, kwargs, has_blocks, leaf)

            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(
        self, layer: nn.Module, index: int, args: tuple, kwargs: dict, has_blocks: bool, leaf: bool
    ) -> Any:
        if index:
            hidden = hidden_state(layer, args, kwargs)
            self._forward[index] = self._now()
            if self._storages is not None:
                self._storages.enter(index)
                self._storages.give(hidden, index)
            self.output_bytes[index - 1] = hidden.numel() * hidden.element_size()
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: self._leave(index))
            return None
        names = [None] if has_blocks and args else list(kwargs)
        if has_blocks and not args:
            names = [hidden_name(layer)]
        changed = {}
        for name in names:
            value = args[0] if name is None else kwargs[name]
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.entering = self.entering or tuple(value.shape)
                # The input gets a gradient in both runs, so that B_d is in both and the difference
                # is B_w.
                start = leaf or not value.requires_grad
                if self._storages is not None:
                    self._storages.give(value, 0)
                changed[name] = value.detach().requires_grad_() if start else value
        if None in changed:
            return (changed.pop(None), *args[1:]), kwargs
        return args, {**kwargs, **changed}

    def _leave(self, index: int) -> None:
        """Record the end of a layer's backward, when the gradient of its input is complete."""
        self._backward[index] = self._now()

    def start_forward(self) -> None:
        self._synchronize()
        self._forward[0] = self._now()

    def end_forward(self, output: torch.Tensor) -> None:
        self._forward[self._count] = self._now()
        self.output_bytes[-1] = output.numel() * output.element_size()
        self.output_shape = tuple(output.shape)
        if self._storages is not None:
            self._storages.give(output, _HANDED_ON)
            for layer, size in self._storages.alive():
                if layer != _HANDED_ON:
                    self.held[layer] += size

    def start_backward(self) -> None:
        self._synchronize()
        self._backward[self._count] = self._now()

    def end_backward(self) -> None:
        self._backward[0] = self._now()
        self._synchronize()

    def forward_times(self) -> list[float]:
        """Return seconds per layer, from the layer's start to the start of the next layer."""
        marks = [self._forward[i] for i in range(self._count + 1)]
        return [self._seconds(a, b) for a, b in zip(marks, marks[1:], strict=False)]

    def both_times(self) -> list[float]:
        pairs = zip(self.forward_times(), self.backward_times(), strict=True)
        return [forward + backward for forward, backward in pairs]

    def backward_times(self) -> list[float]:
        """Return seconds per layer, from the gradient of its output to the gradient of its
        input."""
        marks = [self._backward[0]]  # a layer that no gradient reaches takes no time
        for index in range(1, self._count + 1):
            marks.append(self._backward.get(index, marks[-1]))
        return [self._seconds(b, a) for a, b in zip(marks, marks[1:], strict=False)]

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self._cuda else end - start
