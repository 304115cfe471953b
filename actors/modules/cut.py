"""Execution of a part of a model through the model's own, unmodified forward.

The list of blocks keeps its indices, so parameter names remain checkpoint names. Blocks outside a
stage hold no parameters. Earlier blocks return the hidden state received from the previous stage.
Later blocks end the forward: they raise :class:`ForwardLeft` with their input. Parameters outside
the blocks that the stage does not own become zero-stride ghosts, which take no memory.

A forward may skip blocks, as long as all stages skip the same ones
(:mod:`raymm.actors.modules.draws`). The received hidden state is the input of the first block
called in the stage. The forward is cut at the next block called after the stage. If there is none,
the output of the stage's last block is sent, and that block's placeholder returns it in the next
stage: code between blocks runs once, on one side of the cut.

Code after the blocks may read the outputs of some blocks (feature maps of several layers). These
outputs are relayed: each stage sends them with the hidden state, and the placeholders of their
blocks return them. Placeholders are instances of their block's class, because code that collects
hidden states finds blocks by class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from raymm.actors.modules.blocks import block_list, hidden_name, hidden_state
from raymm.errors import ForwardLeft, InputError


@dataclass(frozen=True)
class CutInfo:
    """Result of probing how a module can be cut; names are relative to the module.

    Attributes:
        tuple_length: 0 if a block returns a tensor, else the length of its tuple or list.
        first, middle, last: names of the parameters outside the blocks that the first, any middle,
            and the last stage use.
        relayed: blocks whose outputs are not only read by the next block.
    """

    blocks: str
    tuple_length: int
    first: frozenset[str]
    middle: frozenset[str]
    last: frozenset[str]
    relayed: tuple[int, ...] = ()

    def relayed_before(self, block: int) -> tuple[int, ...]:
        """Return earlier blocks whose outputs are sent to the stage that starts with ``block``."""
        return tuple(index for index in self.relayed if index < block)

    def outer(self, is_first: bool, is_last: bool) -> frozenset[str]:
        """Return the parameters outside the blocks that a stage at this position owns."""
        names = self.middle
        if is_first:
            names = names | self.first
        if is_last:
            names = names | self.last
        return names


class _Layers:
    """Placeholder for a layer of another stage's block: its parameters are on the meta device."""

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self._name, self._tensors = name, tensors

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _of_layers(f"{self._name}.{name}", self._tensors)


def _of_layers(name: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    if name in tensors:
        return tensors[name]
    if any(tensor_name.startswith(name + ".") for tensor_name in tensors):
        return _Layers(name, tensors)
    raise AttributeError(
        f"the forward reads {name!r} of a block that is on another stage; of such blocks, only "
        "plain attributes and the dtypes of parameters are available"
    )


class _Placeholder(nn.Module):
    """Block without parameters, but with the block's plain attributes and parameter dtypes."""

    def __init__(self, block: nn.Module) -> None:
        nn.Module.__init__(self)  # skips __init__ of the block's class, which may follow in the MRO
        self._hidden_name = hidden_name(block)
        for base in reversed(type(block).__mro__):
            if issubclass(base, nn.Module) and base is not nn.Module:
                for name, value in vars(base).items():
                    if isinstance(value, str | int | float) and not name.startswith("__"):
                        self.__dict__[name] = value
        internal = set(nn.Module().__dict__)
        for name, value in block.__dict__.items():
            if name not in internal and not isinstance(value, nn.Module | torch.Tensor):
                self.__dict__[name] = value
        self.__dict__["_shown"] = {
            name: torch.empty_like(p, device="meta", requires_grad=False)
            for name, p in block.named_parameters()
        }
        self.passage: Passage | None = None

    def set_passage(self, passage: Passage) -> None:
        """Set the passage of the module's forwards; every pruned module has one."""
        self.passage = passage

    def _hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        return args[0] if args else kwargs[self._hidden_name]

    def __getattr__(self, name: str) -> Any:
        return _of_layers(name, self.__dict__.get("_shown", {}))


class PassThrough(_Placeholder):
    """Placeholder for an earlier block; returns the received state in the block's output format."""

    def __init__(self, block: nn.Module, tuple_length: int, index: int) -> None:
        super().__init__(block)
        self._tuple_length, self._index = tuple_length, index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.passage is not None
        hidden = self.passage.passed(self._hidden(args, kwargs), self._index)
        if self._tuple_length:
            return (hidden,) + (None,) * (self._tuple_length - 1)
        return hidden


class CutPoint(_Placeholder):
    """Placeholder for a later block; ends the forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.passage is not None
        raise self.passage.cut(self.passage.arriving(self._hidden(args, kwargs)))


def _stand_in(kind: type[_Placeholder], block: nn.Module, *args: Any) -> nn.Module:
    """Return a placeholder that is also an instance of the block's class."""
    return type(kind.__name__, (kind, type(block)), {"__module__": __name__})(block, *args)


def _in_blocks(name: str, blocks: str) -> int | None:
    """Return the index of the block that a parameter belongs to; None if outside."""
    prefix = blocks + "."
    return int(name[len(prefix) :].split(".")[0]) if name.startswith(prefix) else None


def stage_parameters(module: nn.Module, info: CutInfo, lo: int, hi: int) -> list[str]:
    """Return the names of the parameters that blocks [lo, hi) own. The first and last block include
    the code before and after the list. ``module`` is the complete module or its skeleton."""
    _check_shared(module, info.blocks, lo, hi)
    total = len(block_list(module, info.blocks))
    outer = info.outer(lo == 0, hi == total)
    probed = info.first | info.middle | info.last
    names = []
    for name, _ in module.named_parameters():
        index = _in_blocks(name, info.blocks)
        if index is None:
            # Parameters added after the probe (adapters) belong to the stage of their layer's
            # weight.
            user = name if name in probed else f"{name.rpartition('.')[0]}.weight"
            # A parameter that never gets a gradient needs an owner, too.
            owned = user in outer or (user not in probed and hi == total)
        else:
            owned = lo <= index < hi
        if owned:
            names.append(name)
    return names


def _check_shared(module: nn.Module, blocks: str, lo: int, hi: int) -> None:
    """Raise InputError if blocks [lo, hi) share parameters with the rest of the module. Such
    parameters would be missing from a stage, or duplicated."""
    users_by_id: dict[int, dict[int | None, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        users_by_id.setdefault(id(parameter), {})[_in_blocks(name, blocks)] = name
    for users in users_by_id.values():
        inside = [i for i in users if i is not None and lo <= i < hi]
        outside = [i for i in users if i not in inside]
        if inside and outside:
            raise InputError(
                f"{type(module).__name__} cannot be cut into blocks {lo} to {hi - 1} and others: "
                f"{users[inside[0]]!r} and {users[outside[0]]!r} are one parameter; cut it "
                "elsewhere (layers of its ParallelSpec), or give it one stage (pp 1)"
            )


def ghost_parameter(module: nn.Module, name: str) -> None:
    """Replace a parameter by a zero-stride tensor that is not a parameter."""
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    parameter = owner._parameters.pop(leaf)
    assert parameter is not None
    setattr(owner, leaf, torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))


def own_buffers(module: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that a stage owns. Modules around the blocks with ghost
    parameters are excluded: they would not see real data."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, child in module.named_modules()
        if not any(_is_ghost(value) for value in vars(child).values())
        for name in child._buffers
    )


def _is_ghost(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and not any(value.stride())


def prune(module: nn.Module, info: CutInfo, lo: int, hi: int) -> nn.Module:
    """Reduce a module in place to blocks [lo, hi) and the code around them. Earlier blocks become
    pass-throughs, later blocks end the forward, and parameters that the stage does not own become
    ghosts without memory."""
    blocks = block_list(module, info.blocks)
    owned = set(stage_parameters(module, info, lo, hi))
    for index in range(len(blocks)):
        if index < lo:
            blocks[index] = _stand_in(PassThrough, blocks[index], info.tuple_length, index)
        elif index >= hi:
            blocks[index] = _stand_in(CutPoint, blocks[index])
    kept_ids = {id(p) for n, p in module.named_parameters() if n in owned}
    # remove_duplicate=False: a tied parameter is ghosted or kept under all its names.
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) not in kept_ids:
            ghost_parameter(module, name)
    return module


class Passage:
    """Path of a microbatch's hidden state through blocks [lo, hi) of a pruned module."""

    def __init__(self, module: nn.Module, info: CutInfo, lo: int, hi: int) -> None:
        blocks: Sequence[Any] = cast(Sequence[Any], module.get_submodule(info.blocks))
        self._is_last = hi == len(blocks)
        self._arriving, self._leaving_relays = info.relayed_before(lo), info.relayed_before(hi)
        self._relays: dict[int, torch.Tensor] = {}
        self._skips = True
        self._received: torch.Tensor | None = None
        self._arrived = True
        self._copy: torch.Tensor | None = None
        self._left: torch.Tensor | None = None
        self._version = 0
        self._running = False
        for index, block in enumerate(blocks):
            if lo <= index < hi:
                block.register_forward_pre_hook(self._enter, with_kwargs=True)
                block.register_forward_hook(partial(self._leave, index))
            else:
                block.set_passage(self)

    def stop_skipping(self) -> None:
        """Expect forwards that run all blocks. Blocks of earlier stages then return their input,
        because their results are never used."""
        self._skips = False

    @contextmanager
    def open(
        self, received: torch.Tensor | None, what: str, relays: Sequence[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Context manager around one forward of the module, described by ``what`` in errors.

        Args:
            received: hidden state from the previous stage; None in the first one.

        Raises:
            ForwardLeft: the forward of any stage but the last ended.
            InputError: the forward skipped every block of the module.
        """
        self._received, self._arrived, self._left = received, received is None, None
        self._relays = dict(zip(self._arriving, relays, strict=True))
        self._running = True
        try:
            yield
            self._end(what)
        finally:
            self._running = False
            self._received = self._copy = self._left = None
            self._relays = {}

    def cut(self, hidden: torch.Tensor) -> ForwardLeft:
        """Return the exception that ends the forward of any stage but the last."""
        return ForwardLeft(hidden, tuple(self._relays[n] for n in self._leaving_relays))

    def _end(self, what: str) -> None:
        """Check the end of a forward and leave it, unless this is the last stage."""
        if self._left is None:
            raise InputError(
                f"{what} skipped every block, but a stage can send only what a block returns; give "
                "the module one stage (pp 1), or lower the probability of skipping a block in its "
                "config (layerdrop)"
            )
        if self._is_last:
            return
        if self._left._version != self._version:
            raise RuntimeError(
                f"{what} skipped the last blocks and changed the output of the block before them "
                "in place; give the module one stage (pp 1)"
            )
        raise self.cut(self._left)

    def arriving(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden state with which a block is really called."""
        if self._arrived:
            return hidden
        assert self._received is not None
        self._arrived = True
        return self._received

    def passed(self, hidden: torch.Tensor, index: int) -> torch.Tensor:
        """Return an earlier block's output: a copy, as models may change it in place."""
        if index in self._relays:
            return self._relays[index].clone()
        if not self._skips:
            return hidden
        assert self._received is not None
        if self._copy is None or self._copy._version:
            self._copy = self._received.clone()
        self._leaving(self._received)
        return self._copy

    # During backward, checkpointing may call a block again with its original input.

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._running:
            return None
        hidden = self.arriving(hidden_state(block, args, kwargs))
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, hidden_name(block): hidden}

    def _leave(self, index: int, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._running:
            hidden = output[0] if isinstance(output, tuple | list) else output
            if index in self._leaving_relays:
                self._relays[index] = hidden
            self._leaving(hidden)

    def _leaving(self, hidden: torch.Tensor) -> None:
        self._left, self._version = hidden, hidden._version
