"""Attention as a single operator that dispatch modes see, whatever computes it.

torch's selective checkpointing saves outputs by the operator that made them, and a custom kernel or
an exchange between processes is not an operator. Wrapped as ``raymm::attention``, its output can be
saved, so it does not run again in the backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

_library = torch.library.Library("raymm", "FRAGMENT")
_library.define("attention(Tensor query, Tensor key, Tensor value, int call) -> (Tensor, Tensor)")
_numbers = itertools.count()
# Operators take no functions, so they get the number of an entry; entries exist during a call.
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
    """Run ``compute(query, key, value)`` as an operator, within
    ``torch.autograd.Function.forward``.

    Args:
        compute: returns output and LSE, which must not share memory with its inputs.
    """
    number = next(_numbers)
    _calls[number] = compute
    try:
        return torch.ops.raymm.attention(query, key, value, number)
    finally:
        del _calls[number]
