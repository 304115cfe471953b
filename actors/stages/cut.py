"""Cut and inject: run any part of a model through its own, unmodified forward.

The list of blocks keeps its indices, so parameter names stay checkpoint names. Blocks
outside a stage hold no parameters: those before it pass the hidden state through, the one
right after it ends the forward by raising :class:`CutReached` with what it was called
with. The stage's first block is handed the hidden state that came from the previous
stage. Parameters outside the blocks that the stage does not own become zero-stride
ghosts, which take no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class CutInfo:
    """What a probe learned about a model class (names are relative to the module).

    Attributes:
        blocks: dotted name of the list of blocks.
        tuple_length: 0 if a block returns a tensor, else the length of its tuple.
        first, middle, last: names of the parameters outside the blocks that the first,
            any middle, and the last stage use.
    """

    blocks: str
    tuple_length: int
    first: frozenset[str]
    middle: frozenset[str]
    last: frozenset[str]

    def outer(self, is_first: bool, is_last: bool) -> frozenset[str]:
        """Parameters outside the blocks that a stage at this position owns."""
        names = self.middle
        if is_first:
            names = names | self.first
        if is_last:
            names = names | self.last
        return names


class CutReached(Exception):  # noqa: N818  not an error: the normal end of a cut forward
    """Carries the hidden state that the first block after the stage was called with."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("cut reached")
        self.hidden = hidden


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return args[0] if args else kwargs["hidden_states"]


class _Placeholder(nn.Module):
    """A block without parameters that still shows the plain attributes of the real one and
    of its class (models read things like ``layer.attention_type`` from outside)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for base in reversed(type(block).__mro__):
            if issubclass(base, nn.Module) and base is not nn.Module:
                for name, value in vars(base).items():
                    if isinstance(value, str | int | float) and not name.startswith("__"):
                        self.__dict__[name] = value
        internal = set(nn.Module().__dict__)
        for name, value in block.__dict__.items():
            if name not in internal and not isinstance(value, nn.Module | torch.Tensor):
                self.__dict__[name] = value


class PassThrough(_Placeholder):
    """Returns the hidden state it was given, in the shape a block returns."""

    def __init__(self, block: nn.Module, tuple_length: int) -> None:
        super().__init__(block)
        self._tuple_length = tuple_length

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        if self._tuple_length:
            return (hidden,) + (None,) * (self._tuple_length - 1)
        return hidden


class CutPoint(_Placeholder):
    """Ends the forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise CutReached(_hidden(args, kwargs))


def _in_blocks(name: str, blocks: str) -> int | None:
    """Index of the block that a parameter belongs to; None if outside."""
    prefix = blocks + "."
    return int(name[len(prefix) :].split(".")[0]) if name.startswith(prefix) else None


def stage_parameters(module: nn.Module, info: CutInfo, lo: int, hi: int) -> list[str]:
    """Names of the parameters that blocks [lo, hi) and their surroundings own."""
    total = len(module.get_submodule(info.blocks))
    outer = info.outer(lo == 0, hi == total)
    known = info.first | info.middle | info.last
    names = []
    for name, _ in module.named_parameters():
        index = _in_blocks(name, info.blocks)
        if index is None:
            # A parameter that no gradient ever reached still has to live somewhere.
            owned = name in outer or (name not in known and hi == total)
        else:
            owned = lo <= index < hi
        if owned:
            names.append(name)
    return names


def ghost_parameter(module: nn.Module, name: str) -> None:
    """Replace a parameter by a zero-stride tensor that is no parameter."""
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    parameter = owner._parameters.pop(leaf)
    setattr(owner, leaf, torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))


def own_buffers(module: nn.Module) -> frozenset[str]:
    """Names of the buffers that are a stage's own: not those of modules around the blocks whose
    parameters another stage has, which run on ghosts here (a batch norm before the first block
    would see nothing of the data)."""
    return frozenset(
        f"{where}.{name}" if where else name
        for where, child in module.named_modules()
        if not any(_is_ghost(value) for value in vars(child).values())
        for name in child._buffers
    )


def _is_ghost(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and not any(value.stride())


def prune(module: nn.Module, info: CutInfo, lo: int, hi: int) -> nn.Module:
    """Reduce a module in place to blocks [lo, hi) and what surrounds them."""
    blocks = module.get_submodule(info.blocks)
    owned = set(stage_parameters(module, info, lo, hi))
    for index in range(len(blocks)):
        if index < lo or index > hi:
            blocks[index] = PassThrough(blocks[index], info.tuple_length)
        elif index == hi:
            blocks[index] = CutPoint(blocks[index])
    kept = {id(p) for n, p in module.named_parameters() if n in owned}
    # remove_duplicate=False: a tied parameter is ghosted, or kept, under all its names.
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) not in kept:
            ghost_parameter(module, name)
    return module


def inject(module: nn.Module, info: CutInfo, lo: int) -> Callable[[torch.Tensor], None]:
    """Make block ``lo`` take its hidden state from the returned setter.

    The setter holds one hidden state for the next forward, which clears it.
    """
    slot: list[torch.Tensor] = []

    def replace(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = slot.pop()
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    block = module.get_submodule(info.blocks)[lo]
    block.register_forward_pre_hook(replace, with_kwargs=True)

    def set_hidden(hidden: torch.Tensor) -> None:
        slot.clear()
        slot.append(hidden)

    return set_hidden


def frozen_names(module: nn.Module) -> Collection[str]:
    """Names of parameters with ``requires_grad=False``."""
    return {name for name, p in module.named_parameters() if not p.requires_grad}
