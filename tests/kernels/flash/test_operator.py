"""Attention is one operator that dispatch modes see, whatever computes it."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raymm.kernels.flash.operator import ATTENTION, _calls, attention_operator


class Seen(TorchDispatchMode):
    """Mode that records operators."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def compute(query, key, value):
    return query + key * value, query.sum(-1)


def test_a_mode_sees_the_operator_and_its_result():
    given = [torch.randn(2, 3) for _ in range(3)]
    with Seen() as seen:
        out, lse = attention_operator(compute, *given)
    assert seen.operators[0] is ATTENTION
    expected = compute(*given)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_calls_within_calls_keep_their_functions():
    def outer(query, key, value):
        out, lse = attention_operator(compute, query, key, value)
        return out * 2, lse

    given = [torch.randn(2, 3) for _ in range(3)]
    assert torch.equal(attention_operator(outer, *given)[0], compute(*given)[0] * 2)
    assert not _calls


def test_a_function_that_raises_leaves_no_entry():
    def fails(query, key, value):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        attention_operator(fails, *[torch.zeros(1)] * 3)
    assert not _calls
