"""Context parallelism of an encoder: its blocks run on a part of every item's tokens.

Every process runs the unmodified forward on complete inputs. The hidden state is reduced to the
process's tokens at the first block, and gathered after the last one. Stages in the middle receive
and send only their process's tokens, but learn the layout from the hidden state that their own code
creates.

Parameter gradients are correct when *summed over processes*. After the blocks, one process has all
of the gradient (:mod:`raymm.kernels.collectives.gather`). Shares are contiguous and differ
by at most one token. Processes without tokens use copies of the last one and discard the results.

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
from raymm.kernels.collectives.gather import gather_tokens
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.call import ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.hf import self_attention as hf_attention
from raymm.kernels.mask.convert import from_dense
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.shared_draws import Cut, Grid, current_draws, set_grid

_CACHED_MASKS = 64


class Peers(Protocol):
    """Collective operations of the processes of a group; ``rank`` and ``size`` describe this
    process."""

    rank: int
    size: int

    def attend(self, layout: ContextLayout) -> Attend:
        """Return attention of this process's tokens to all tokens."""
        ...

    def gather(self, local: torch.Tensor, layout: ContextLayout) -> torch.Tensor:
        """(B, t, C) of this process -> (B, T, C)."""
        ...


class ProcessPeers:
    """:class:`Peers` of a process group; ``backward`` enters the choice of the attention method."""

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
    """Context manager around an encoder's forward that makes blocks [lo, hi) run on a process's
    tokens.

    ``module``, with its hidden-state hook installed, gets raymm's attention and has only these
    blocks.
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
            # Runs before the hidden-state hook: the original hidden state has the full shape.
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
        """Get T at the stage's first block and, in the first stage, reduce the tokens."""
        hidden = hidden_state(block, args, kwargs)
        if self._layout is not None:
            raise ModelError("it runs its first block more than once in a forward")
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3:
            shape = tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else "of no tensor"
            raise ModelError(
                f"it passes its blocks a hidden state {shape}; expected (items, tokens, width)"
            )
        self._length = hidden.shape[1]
        # Every process needs a token: models reshape to (B, t, -1, D), which is ambiguous for t =
        # 0.
        length = max(self._length, self._peers.size)
        self._layout = layout = ContextLayout.even(length, self._peers.size)
        attend = self._peers.attend(layout)
        if length > self._length:
            attend = _among_replicas(attend, length)
        self._attention.start(attend, self._length)
        self._set_grid(hidden.shape[0])
        return self._cut(block, args, kwargs, hidden_too=self._first == 0)

    def _set_grid(self, items: int) -> None:
        """Slice random numbers of the blocks by the tokens of this process."""
        if (draws := current_draws()) is None:
            return
        self._outside = draws.grid
        start, stop = self._own_range
        rows = Cut.uncut(items) if self._outside is None else self._outside.rows
        set_grid(Grid(rows, Cut.from_range(start, stop, self._length)))

    @property
    def _own_range(self) -> tuple[int, int]:
        """[start, stop) of the tokens of this process."""
        assert self._layout is not None
        ((start, stop),) = self._layout.ranges[self._peers.rank]
        if stop > self._length:  # copy of the last token, hidden from all others
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
        assert self._layout is not None  # set at the first block
        gathered = self._peers.gather(local, self._layout)[:, : self._length]
        self._attention.stop()
        set_grid(self._outside)
        return (gathered, *output[1:]) if isinstance(output, tuple) else gathered

    def _cut(
        self, block: nn.Module, args: tuple, kwargs: dict[str, Any], hidden_too: bool
    ) -> Any:
        start, stop = self._own_range
        further, named = list(args), dict(kwargs)
        hidden = further.pop(0) if args else named.pop(hidden_name(block))
        further, named = _own_tokens((further, named), self._length, start, stop)
        hidden = hidden[:, start:stop] if hidden_too else hidden
        if args:
            return (hidden, *further), named
        return (), {hidden_name(block): hidden, **named}


def _among_replicas(attend: Attend, length: int) -> Attend:
    """Return attention over fewer than ``length`` tokens; the others are fully masked."""

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
    """Select the process's part of tables (..., T, D) and numbers (..., T), but not of masks (B, 1,
    T, T)."""
    if isinstance(value, tuple | list):
        return type(value)(_own_tokens(item, length, start, stop) for item in value)
    if isinstance(value, dict):
        return {name: _own_tokens(item, length, start, stop) for name, item in value.items()}
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    has_rows = value.dim() > 1 and value.shape[-2] == length
    has_columns = value.shape[-1] == length
    square = has_rows and has_columns
    if has_columns and (value.dim() == 4 or (square and value.dtype == torch.bool)):
        return value
    if has_rows and (value.is_floating_point() or not square):
        return value[..., start:stop, :]
    return value[..., start:stop] if has_columns else value
