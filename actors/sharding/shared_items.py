"""Context parallelism of an encoder: its blocks work on a part of every item's tokens.

Every process runs the unmodified forward on complete inputs. At the input of the first block the
hidden state is cut down to the process's tokens; after the last one the tokens of all processes
are gathered. In between only attention knows of other tokens. A pipeline stage in the middle is
handed, and hands on, its process's tokens.

Gradients of parameters are right when *summed over processes*, wherever the parameters are:
before the blocks each process has the part that comes through its tokens, in the blocks that of
its tokens, and after them one process has all of it
(:mod:`raymm.kernels.collectives.gather_tokens`).

Every stage computes the layout anew, so nothing is said about it: also in a middle stage, what
runs before the blocks makes a hidden state of the full shape, which is then replaced by the one
that was received. The same goes for masks and rotary tables, which are of all tokens.

Shares are contiguous and differ by at most one token. Where there are fewer tokens than processes,
those that are left over work on copies of the last token that are thrown away.

Legend: ``B`` items, ``T`` tokens, ``t`` tokens of a process, ``C`` width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import nn

from raymm.actors.modules.blocks import block_list, hidden_name, hidden_state, method_of
from raymm.actors.sharding.context_method import Attend, attend_over
from raymm.errors import ModelError
from raymm.kernels.collectives.gather_tokens import gather_tokens
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.call import ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.hf import self_attention as hf_attention
from raymm.kernels.mask.convert import from_dense
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.shared_draws import Cut, Grid, current_draws, set_grid

_CACHED_MASKS = 64


class Peers(Protocol):
    """What the processes of a group do together.

    Attributes:
        rank, size: this process's place in the group, and how many there are.
    """

    rank: int
    size: int

    def attend(self, layout: ContextLayout) -> Attend:
        """Attention of this process's tokens to all tokens."""
        ...

    def gather(self, local: torch.Tensor, layout: ContextLayout) -> torch.Tensor:
        """(B, t, C) of this process -> (B, T, C)."""
        ...


class ProcessPeers:
    """:class:`Peers` that are processes of a group.

    Args:
        backward: whether the stage has a backward pass, for the choice of a method.
    """

    def __init__(self, exchange: Exchange, backward: bool) -> None:
        self.rank, self.size = exchange.rank, exchange.size
        self._exchange, self._backward = exchange, backward

    def attend(self, layout: ContextLayout) -> Attend:
        return attend_over(
            ContextGroup(self._exchange, layout, layout), backward=self._backward
        )

    def gather(self, local: torch.Tensor, layout: ContextLayout) -> torch.Tensor:
        return gather_tokens(local, layout.sizes, self._exchange)


class SharedItems:
    """Makes blocks [lo, hi) of an encoder work on a process's tokens, from outside.

    Use as a context manager around the module's forward.

    Args:
        module: the encoder, or a part of it (:mod:`raymm.actors.modules.cut`), with the hook that
            injects a hidden state, if any, in place already. Its attention becomes raymm's.
        blocks: dotted name of its list of blocks.
        lo, hi: the blocks that the module still has.
        peers: the processes that share the tokens.
    """

    def __init__(
        self, module: nn.Module, blocks: str, lo: int, hi: int, peers: Peers
    ) -> None:
        hf_attention.register()
        method_of(module, "set_attn_implementation")(hf_attention.NAME)
        self._peers, self._first = peers, lo
        self._attention = hf_attention.SharedTokens()
        self._layout: ContextLayout | None = None
        self._length = 0
        self._outside: Grid | None = None
        every = block_list(module, blocks)
        for number in range(lo, hi):
            block = every[number]
            self._attention.attach(block)
            # Before the injection: the hidden state that it replaces has the full shape.
            block.register_forward_pre_hook(
                self._before_first if number == lo else self._before, prepend=True,
                with_kwargs=True,
            )
        self._ends = hi == len(every)
        if self._ends:
            every[hi - 1].register_forward_hook(self._after_last)

    def __enter__(self) -> None:
        self._layout = None

    def __exit__(self, *_: Any) -> None:
        self._layout = None
        self._attention.stop()

    def _before_first(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The first block of this stage: learn T and, in the first stage, cut the tokens."""
        hidden = hidden_state(block, args, kwargs)
        if self._layout is not None:
            raise ModelError("it runs its first block more than once in a forward")
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3:
            shape = tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else "of no tensor"
            raise ModelError(
                f"it passes its blocks a hidden state {shape}; expected (items, tokens, width)"
            )
        self._length = hidden.shape[1]
        # Nobody is without a token: models reshape to (B, t, -1, D), which says nothing for t = 0.
        length = max(self._length, self._peers.size)
        self._layout = layout = ContextLayout.even(length, self._peers.size)
        attend = self._peers.attend(layout)
        if length > self._length:
            attend = _among_replicas(attend, length)
        self._attention.start(attend, self._length)
        self._set_grid(hidden.shape[0])
        return self._cut(block, args, kwargs, hidden_too=self._first == 0)

    def _set_grid(self, items: int) -> None:
        """Cut what blocks draw by the tokens of this process."""
        if (draws := current_draws()) is None:
            return
        self._outside = draws.grid
        start, stop = self._own_range
        rows = Cut.uncut(items) if self._outside is None else self._outside.rows
        draws.grid = Grid(rows, Cut.from_range(start, stop, self._length))

    @property
    def _own_range(self) -> tuple[int, int]:
        """[start, stop) of the tokens of this process."""
        assert self._layout is not None
        ((start, stop),) = self._layout.ranges[self._peers.rank]
        if stop > self._length:  # a copy of the last token, which no token sees
            return self._length - 1, self._length
        return start, stop

    def _before(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self._layout is None:
            raise ModelError("it runs a block before its first one")
        return self._cut(block, args, kwargs, hidden_too=False)

    def _after_last(self, block: nn.Module, args: tuple, output: Any) -> Any:
        local = output[0] if isinstance(output, tuple) else output
        if not isinstance(local, torch.Tensor) or local.dim() != 3:
            raise ModelError("its last block does not return a tensor (items, tokens, width)")
        assert self._layout is not None  # since its first block
        whole = self._peers.gather(local, self._layout)[:, : self._length]
        self._attention.stop()
        set_grid(self._outside)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    def _cut(
        self, block: nn.Module, args: tuple, kwargs: dict[str, Any], hidden_too: bool
    ) -> Any:
        start, stop = self._own_range
        others, named = list(args), dict(kwargs)
        hidden = others.pop(0) if args else named.pop(hidden_name(block))
        others, named = _own_tokens((others, named), self._length, start, stop)
        hidden = hidden[:, start:stop] if hidden_too else hidden
        if args:
            return (hidden, *others), named
        return (), {hidden_name(block): hidden, **named}


def _among_replicas(attend: Attend, length: int) -> Attend:
    """Attention among fewer tokens than ``length``; those from there on see and show nothing."""

    def padded(*tensors: Any, **options: Any) -> torch.Tensor:
        *qkv, masks = tensors
        return attend(*qkv, tuple(_padded(mask, length) for mask in masks), **options)

    return padded


@lru_cache(maxsize=_CACHED_MASKS)
def _padded(mask: AttentionMask, length: int) -> AttentionMask:
    dense = torch.zeros(length, length, dtype=torch.bool)
    rows, keys = mask.shape
    dense[:rows, :keys] = mask.dense()
    return from_dense(dense)


def _own_tokens(value: Any, length: int, start: int, stop: int) -> Any:
    """A process's part of what else blocks are handed: of tables (..., T, D) (rotary embeddings)
    and numbers (..., T) (position ids). Masks (B, 1, T, T) stay whole: attention reads them."""
    if isinstance(value, tuple | list):
        return type(value)(_own_tokens(item, length, start, stop) for item in value)
    if isinstance(value, dict):
        return {name: _own_tokens(item, length, start, stop) for name, item in value.items()}
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    of_rows = value.dim() > 1 and value.shape[-2] == length
    of_columns = value.shape[-1] == length
    square = of_rows and of_columns
    if of_columns and (value.dim() == 4 or (square and value.dtype == torch.bool)):
        return value
    if of_rows and (value.is_floating_point() or not square):
        return value[..., start:stop, :]
    return value[..., start:stop] if of_columns else value
