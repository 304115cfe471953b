"""Peak memory of each layer of a module while it computes."""

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
    """Measure peak bytes per layer; ``held`` are the bytes that each layer keeps for its backward.

    Returns:
        Per layer, the peak of forward and backward beyond the activations of this and earlier
        layers and the layer's output; and the peak of a forward without gradients.
    """
    initial = live.now
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
        max(0, most - end, back - initial - held_so_far)
        for most, end, back, held_so_far in zip(
            marks.forward, marks.after, marks.backward, accumulate(held), strict=True
        )
    ]
    # The output of the last layer stays allocated until its backward has finished.
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
    """Peak bytes of every layer's forward and backward.

    Attributes:
        after: bytes alive after the layer's forward, including its output.
    """

    def __init__(self, live: LiveBytes | DeviceBytes, layers: int) -> None:
        self._live = live
        self.forward, self.after, self.backward = [0] * layers, [0] * layers, [0] * layers
        live.restart()

    def enter(self, index: int, layer: nn.Module, args: tuple, kwargs: dict) -> None:
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
        self._over(len(self.forward))

    def end_backward(self) -> None:
        self._left(0)
