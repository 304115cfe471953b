"""Comparison of a received message with the sent one."""

import torch

from raymm.actors.modules.message import Message


def check_equal(key: str, got: Message, due: Message) -> None:
    """Check names in order, dtypes, shapes and values.

    Raises:
        AssertionError: with ``key``, which identifies message and layout.
    """
    assert list(got.side) == list(due.side), key
    assert len(got.tensors) == len(due.tensors), key
    pairs = [*zip(got.tensors, due.tensors, strict=True)]
    pairs += [(got.side[name], due.side[name]) for name in due.side]
    for mine, wanted in pairs:
        assert mine.dtype == wanted.dtype and mine.shape == wanted.shape, key
        assert torch.equal(mine, wanted), key
