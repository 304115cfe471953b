"""Arguments of an attention call over the ranks of a group, except its tensors.

For the legend of shapes see ``attention.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raymm.errors import ModelError
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.layout import ContextLayout, local_masks
from raymm.kernels.flash.operands import BackwardTensors
from raymm.kernels.mask.mask import AttentionMask

ACCUMULATOR = torch.float32
"""Dtype of sums over ranks."""


@dataclass(frozen=True)
class ContextGroup:
    """Ranks over which a sequence is split, and the tokens of each rank.

    Attributes:
        queries: rows of each rank.
        keys: keys of each rank; the same as ``queries`` in self-attention.
    """

    exchange: Exchange
    queries: ContextLayout
    keys: ContextLayout

    def __post_init__(self) -> None:
        for name, layout in (("queries", self.queries), ("keys", self.keys)):
            if layout.num_ranks != self.exchange.size:
                raise ModelError(
                    f"{name} are split over {layout.num_ranks} ranks; the group has "
                    f"{self.exchange.size}, and both must be equal"
                )

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.exchange.rank


@dataclass(frozen=True)
class ContextCall:
    """An attention call, except its tensors.

    Attributes:
        group: ranks and token layouts.
        masks: of the full sequence; one for all sequences, or one each.
        scale: default ``D ** -0.5``.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None to leave them.
    """

    group: ContextGroup
    masks: Sequence[AttentionMask]
    scale: float | None = None
    softcap: float | None = None

    @property
    def _factors(self) -> tuple[float, float | None]:
        assert self.scale is not None  # set before the computation
        return self.scale, self.softcap

    def masks_of(self, query_rank: int, key_rank: int) -> tuple[AttentionMask, ...]:
        """Return the masks for one rank's rows and one rank's keys."""
        rows = self.group.queries.ranges[query_rank]
        return local_masks(tuple(self.masks), rows, self.group.keys.ranges[key_rank])

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        masks: Sequence[AttentionMask],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return output and LSE (fp32) of rows over a part of the keys, which may be empty."""
        if not key.shape[2] or not query.shape[2]:
            nothing = torch.full(query.shape[:3], -torch.inf, device=query.device)
            return query.new_zeros(*query.shape[:3], value.shape[3]), nothing
        if query.device.type == "cpu":
            from raymm.kernels.flash.cpu.attention import cpu_forward as run
        else:
            from raymm.kernels.flash.gpu.attention import triton_forward as run
        out, lse = run(query, key, value, tuple(masks), *self._factors)
        return out, lse.float()

    def backward(
        self, grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
        masks: Sequence[AttentionMask],
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Return the contribution of a part of the keys to dQ, dK and dV, in fp32.

        Args:
            lse: (B, Hq, Tq) over *all* keys that the rows see.
            delta: (B, Hq, Tq), :func:`raymm.kernels.context_parallel.call.row_delta` of the full
                output.
        """
        if not key.shape[2] or not query.shape[2]:
            return tuple(torch.zeros(t.shape, device=t.device) for t in (query, key, value))
        if query.device.type == "cpu":
            from raymm.kernels.flash.cpu.attention import cpu_backward as run
        else:
            from raymm.kernels.flash.gpu.attention import triton_backward as run
        out = output_like(grad_out, delta)
        tensors = BackwardTensors(grad_out, query, key, value, out, lse)
        gradients = run(tensors, tuple(masks), *self._factors)
        return tuple(g for g in gradients if g is not None)  # none is None: all are requested


class Way(NamedTuple):
    """A method: ``forward(call, q, k, v) -> out, saved`` and ``backward(call, dO, saved) -> dQ, dK,
    dV`` in fp32. If ``saves_inputs`` is True, ``saved`` is (q, k, v, out, LSE)."""

    forward: Callable[..., tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
    backward: Callable[..., tuple[torch.Tensor, ...]]
    saves_inputs: bool = True


def with_tokens(shape: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Return a (B, H, T, ...) shape with another number of tokens."""
    return (*shape[:2], tokens, *shape[3:])


def merge_partials(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of keys, in fp32 (LV-XAttn, Alg. 1, ``Rescale``, with
    one LSE in place of its m and l).

    Args:
        out, other_out: (B, H, Tq, D).
        lse, other_lse: (B, H, Tq) fp32; -inf for rows that see no key.

    Returns:
        (B, H, Tq, D) fp32 and (B, H, Tq) fp32.
    """
    merged = torch.logaddexp(lse, other_lse)
    # Rows that see no key in either part give -inf - (-inf); set their weights to 0.
    is_masked = merged == -torch.inf
    weight = (lse - merged).masked_fill_(is_masked, -torch.inf).exp_()
    other_weight = (other_lse - merged).masked_fill_(is_masked, -torch.inf).exp_()
    return out.float() * weight[..., None] + other_out.float() * other_weight[..., None], merged


def row_delta(grad_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return rowsum(dO * O), (B, H, Tq) fp32. Backward needs nothing else of the output."""
    return (grad_out.float() * out.float()).sum(dim=-1)


def output_like(grad_out: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return a multiple of dO with the given ``delta``, to pass as O to kernels that read O only to
    compute rowsum(dO * O)."""
    largest = grad_out.abs().amax(dim=-1, keepdim=True).float()
    unit = grad_out.float() / largest.masked_fill(largest == 0, 1.0)
    length = (unit * unit).sum(dim=-1, keepdim=True)
    multiple = delta[..., None] / (largest * length).masked_fill(largest == 0, 1.0)
    return (unit * multiple).to(grad_out.dtype)
