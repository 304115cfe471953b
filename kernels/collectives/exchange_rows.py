"""Rows of a tensor to other processes, any number to each, differentiably (all-to-all)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


def exchange_counts(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What every process says to this one.

    Args:
        counts: (P, N) integers, row p for process p of the group.
        group: the processes; all must call it together.

    Returns:
        (P, N), row p from process p.
    """
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def exchange_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """What every process sends to this one. Gradients go back the same way.

    All processes of the group must call it together, forward and backward, also those that have
    nothing to send: its backward must be reached on all of them.

    Args:
        rows: (sum of ``sent``, C), those for process 0 first.
        sent: rows for each process.
        received: rows from each.
        group: the processes.

    Returns:
        (sum of ``received``, C), those from process 0 first.
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
