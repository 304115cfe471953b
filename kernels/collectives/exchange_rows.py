"""Differentiable all-to-all of tensor rows, with any number of rows per process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


def exchange_counts(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send one row of counts to each process and return the rows received. All must call it.

    Args:
        counts: (P, N) integers, row p for process p of the group.

    Returns:
        (P, N), row p from process p.
    """
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def exchange_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send rows to every process and return the rows received. Backward sends gradients back.

    All processes of the group must call this function and reach its backward, including those that
    have nothing to send.

    Args:
        rows: (sum of ``sent``, C), ordered by destination.
        sent: number of rows for each process.
        received: number of rows from each process.

    Returns:
        (sum of ``received``, C), ordered by source.
    """
    return _Exchange.apply(rows, list(sent), list(received), group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:  # fmt: skip
        ctx.way = sent, received, group
        return _sent(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received, group = ctx.way
        return _sent(gradient, received, sent, group), None, None, None


def _sent(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
