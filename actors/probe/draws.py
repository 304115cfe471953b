"""Forced random decisions: a block that is skipped once in 100 forwards is skipped in every second.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


@contextmanager
def extreme_draws() -> Iterator[None]:
    """Context manager that rounds random numbers of torch, numpy and Python to their interval's
    ends.

    The generators' states decide between the ends, so that both outcomes of a comparison occur.
    """
    ends = {
        np.random: {
            "random": _fraction(np.random.random), "random_sample": _fraction(np.random.random),
            "rand": lambda *shape: np.round(np.random.mtrand.rand(*shape)),
            "uniform": _uniform(np.random.random),
        },
        random: {"random": _fraction(random.random), "uniform": _uniform(random.random)},
    }
    with ExitStack() as stack:
        for module, functions in ends.items():
            stack.enter_context(mock.patch.multiple(module, **functions))
        stack.enter_context(_TorchExtremes())
        yield


def _fraction(draw: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *size, **options: np.round(draw(*size, **options))


def _uniform(draw: Callable[..., Any]) -> Callable[..., Any]:
    def uniform(low: Any = 0.0, high: Any = 1.0, *size: Any, **options: Any) -> Any:
        return low + np.round(draw(*size, **options)) * (high - low)

    return uniform


class _TorchExtremes(TorchDispatchMode):
    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        drawn = operator(*args, **options)
        packet = operator.overloadpacket
        if packet in (_aten.rand, _aten.rand_like):
            return drawn.round_()
        if packet is _aten.uniform_:
            low, high = (*args[1:3], *(0.0, 1.0)[len(args) - 1 :])
            low, high = options.get("from", low), options.get("to", high)
            return drawn.sub_(low).div_(high - low or 1.0).round_().mul_(high - low).add_(low)
        if packet in (_aten.bernoulli, _aten.bernoulli_) and drawn.numel() == 1:
            return drawn.fill_(float(torch.rand(()).round()))
        return drawn


class DrawnShapes:
    """Context manager around a forward that records in ``shapes`` what the blocks draw from torch.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self._blocks = tuple(blocks)
        self._stack = ExitStack()

    def __enter__(self) -> DrawnShapes:
        noting: list[NotedDraws] = []

        def begin(*_: Any) -> None:
            noting.append(NotedDraws(self.shapes))
            noting[-1].__enter__()

        def end(*_: Any) -> None:
            if noting:
                noting.pop().__exit__(None, None, None)

        for block in self._blocks:
            for hook in (
                block.register_forward_pre_hook(begin),
                block.register_forward_hook(end, always_call=True),
            ):
                self._stack.callback(hook.remove)
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()


class NotedDraws(TorchDispatchMode):
    """Mode that appends the shapes of random tensors, also on the meta device, to a list."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self._shapes = shapes

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in operator.tags:
            first = result[0] if isinstance(result, tuple) else result
            self._shapes.append(tuple(first.shape))
        return result
