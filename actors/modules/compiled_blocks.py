"""Blocks of a stage compiled by ``torch.compile``, each as one graph.

Blocks of one class share compiled code: parameters are inputs of the graph. Sizes are symbolic, so
microbatches of other lengths run the same code. Masks of raymm's attention are inputs, too
(:mod:`raymm.kernels.masked_operator`). Random numbers are those of uncompiled blocks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from raymm.errors import ModelError
from raymm.kernels.hf.self_attention import traceable

BLOCKS = "blocks"
"""Value of ``run.compile``."""
MOST_GRAPHS = 32
"""Graphs per class of blocks: kinds of layers (windows), with and without gradients or autocast.
More are an error, because each costs a compilation."""
_CACHE_ARGUMENT = "past_key_values"


def compile_blocks(blocks: Iterable[nn.Module], name: str, backend: str = "inductor") -> None:
    """Compile blocks at their first call, in place. Forwards with a key-value cache (generation)
    and under a dispatch mode (observers) run uncompiled.

    Args:
        name: the module, for errors.
        backend: of ``torch.compile``.

    Raises:
        ModelError: the forward of a block was replaced. Calls raise it for a block whose forward is
            not one graph, and for more than :data:`MOST_GRAPHS` graphs.
    """
    _configure()
    for block in blocks:
        if "forward" in vars(block):
            raise ModelError(
                f"cannot compile {name!r}: the forward of its {type(block).__name__} was replaced; "
                "set run.compile to null"
            )
        block.forward = _CompiledForward(block, name, backend)


def _configure() -> None:
    """Set limits of this process. Dimensions of equal size get separate symbols: otherwise code is
    compiled again when they differ."""
    import torch._dynamo
    import torch.fx.experimental._config as symbolic_shapes

    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, MOST_GRAPHS)
    symbolic_shapes.use_duck_shape = False


class _CompiledForward:
    """Forward of a block, compiled."""

    def __init__(self, block: nn.Module, name: str, backend: str) -> None:
        self._block, self._name, self._backend = block, name, backend
        self._parameters = list(inspect.signature(block.forward).parameters.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block, kind = self._block, type(self._block)
        kwargs |= {p.name: value for p, value in zip(self._parameters, args, strict=False)}
        if kwargs.get(_CACHE_ARGUMENT) is not None or torch._C._len_torch_dispatch_stack():
            return kind.forward(block, **kwargs)
        from torch._dynamo.exc import TorchDynamoException  # imported by now

        try:
            return _compiled(kind, self._backend)(block, **traceable(kwargs))
        except TorchDynamoException as error:
            raise ModelError(
                f"cannot compile {self._name!r}: {kind.__name__}.forward is not one graph; set "
                f"run.compile to null. torch.compile reports: {error}"
            ) from error


@functools.cache
def _compiled(kind: type[nn.Module], backend: str) -> Callable[..., Any]:
    """Return the compiled forward of a class of blocks, which all of its blocks share."""
    options: Any = {"fallback_random": True} if backend == "inductor" else None
    return torch.compile(
        kind.forward, fullgraph=True, dynamic=True, backend=backend, options=options
    )
