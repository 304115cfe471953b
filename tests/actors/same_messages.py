"""When a message that came through a channel is the one that was sent."""

import torch

from raymm.actors.modules.message import Message


def check_equal(key: str, got: Message, due: Message) -> None:
    """Same names in the same order, dtypes, shapes and values.

    Raises:
        AssertionError: with ``key``, which says what message of which layout it was.
    """
    assert list(got.side) == list(due.side), key
    assert len(got.tensors) == len(due.tensors), key
    pairs = [*zip(got.tensors, due.tensors, strict=True)]
    pairs += [(got.side[name], due.side[name]) for name in due.side]
    for mine, wanted in pairs:
        assert mine.dtype == wanted.dtype and mine.shape == wanted.shape, key
        assert torch.equal(mine, wanted), key
