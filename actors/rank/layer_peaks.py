"""How many bytes a module's layers have at most while they work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from raymm.actors.memory.live_bytes import DeviceBytes, LiveBytes
from raymm.actors.modules.blocks import hidden_state


def layer_peaks(
    run: Callable[[], torch.Tensor], layers: Sequence[nn.Module], live: LiveBytes | DeviceBytes,
    held: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Per layer, the most bytes that it has for a time in a forward or a backward beyond what it
    and the layers before it keep, and its output; and the most of a forward that keeps nothing.

    Args:
        run: runs the module's forward and returns its output.
        layers: what it is made of, in order.
        live: counts bytes.
        held: what each layer keeps for its backward.
    """
    before = live.now
    marks = _Marks(live, len(layers))
    output = _marked(run, layers, marks)
    marks.end_forward()
    size = int(output.nbytes)
    gradient = None if output.dim() == 0 else torch.randn_like(output)
    live.restart()
    output.backward(gradient)
    marks.end_backward()
    del output, gradient
    alone, start = _Marks(live, len(layers)), live.now
    with torch.no_grad():
        _marked(run, layers, alone)
    alone.end_forward()
    working = [
        max(0, most - end, back - before - kept)
        for most, end, back, kept in zip(
            marks.forward, marks.after, marks.backward, accumulate(held), strict=True
        )
    ]
    # The last one's output is there, too, until its backward is over.
    working[-1] = max(0, working[-1] - size)
    return working, [most - start for most in alone.forward]


def _marked(
    run: Callable[[], torch.Tensor], layers: Sequence[nn.Module], marks: _Marks
) -> torch.Tensor:
    handles = [
        layer.register_forward_pre_hook(partial(marks.enter, index), with_kwargs=True)
        for index, layer in enumerate(layers) if index
    ]
    try:
        return run()
    finally:
        for handle in handles:
            handle.remove()


class _Marks:
    """How many bytes were alive at most in every layer's forward and backward.

    Attributes:
        forward, backward: per layer, the most.
        after: what its forward left behind, its output too.
    """

    def __init__(self, live: LiveBytes | DeviceBytes, layers: int) -> None:
        self._live = live
        self.forward, self.after, self.backward = [0] * layers, [0] * layers, [0] * layers
        live.restart()

    def enter(self, index: int, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        """A layer's forward begins, and that of the one before it is over."""
        self._over(index)
        hidden = hidden_state(layer, args, kwargs)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._left(index))

    def _over(self, index: int) -> None:
        self.forward[index - 1], self.after[index - 1] = self._live.most, self._live.now
        self._live.restart()

    def _left(self, index: int) -> None:
        self.backward[index] = self._live.most
        self._live.restart()

    def end_forward(self) -> None:
        """The last layer's forward is over."""
        self._over(len(self.forward))

    def end_backward(self) -> None:
        """The first layer's backward is over."""
        self._left(0)
