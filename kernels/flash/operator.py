"""Attention as one operator that dispatch modes see, whatever computes it.

torch's selective checkpointing keeps outputs by the operator that made them. A kernel of our own,
or an exchange between processes, is none: here it becomes ``raymm::attention``, whose output can
be kept so that neither runs again in the backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

_library = torch.library.Library("raymm", "FRAGMENT")
_library.define("attention(Tensor query, Tensor key, Tensor value, int call) -> (Tensor, Tensor)")
_numbers = itertools.count()
# What an operator cannot be given: how to compute. Numbers are of calls under way.
_calls: dict[int, Compute] = {}


def _run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _calls[call](query, key, value)


_library.impl("attention", _run, "CompositeExplicitAutograd")
ATTENTION = torch.ops.raymm.attention.default
"""The operator."""


def attention_operator(
    compute: Compute, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``compute(query, key, value)`` as an operator; for ``torch.autograd.Function.forward``.

    Args:
        compute: gives output and LSE, which share no memory with what it is given.
        query: (B, Hq, Tq, D).
        key: (B, Hk, Tk, D).
        value: (B, Hk, Tk, Dv).
    """
    number = next(_numbers)
    _calls[number] = compute
    try:
        return torch.ops.raymm.attention(query, key, value, number)
    finally:
        del _calls[number]
