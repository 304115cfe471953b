"""Copies of many tensors in one block of page-locked memory."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymm.actors.optimizer.checkpoint_writer import HostCopy
from raymm.actors.optimizer.pinned_arena import ALIGNMENT, PinnedArena

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float64)
SHAPES = st.lists(st.integers(0, 5), max_size=3)


@pytest.fixture(scope="module")
def pinned() -> Any:
    """What CUDA has registered: bytes by address."""
    registered: dict[int, int] = {}

    def register(address: int, nbytes: int, flags: int) -> int:
        registered[address] = nbytes
        return 2 if nbytes >= 2**20 else 0  # cudaErrorMemoryAllocation

    cuda = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=registered.pop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", lambda: cuda)
        patch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=list, synchronize=list))
        yield registered


@given(st.lists(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=6), max_size=4))
def test_tensors_have_memory_of_their_size_that_is_used_again(pinned, rounds) -> None:
    pinned.clear()
    arena, most = PinnedArena(), 0
    for layout in rounds:
        originals = [
            (torch.arange(math.prod(shape)) % 2 + n % 2).to(dtype).view(shape)
            for n, (shape, dtype) in enumerate(layout)
        ]
        targets = arena.tensors(originals)
        for target, original in zip(targets, originals, strict=True):
            target.copy_(original)
        assert all(map(torch.equal, targets, originals))
        assert all(target.is_contiguous() for target in targets)
        most = max(most, sum(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in originals))
        assert sum(pinned.values()) == arena.nbytes == most


def test_a_checkpoint_pins_as_much_as_it_copies(pinned) -> None:
    """In one block: of tensors that are pinned by themselves, each is rounded to a power of two."""
    pinned.clear()
    files = {
        file: {f"{n}": torch.full((5, 13), float(n)) for n in range(9)} for file in ("a", "b")
    }
    copies = HostCopy(torch.device("cuda"))
    for _ in range(2):
        assert copies.copy(files) == 18 * 5 * 13 * 4
        (nbytes,) = pinned.values()
        assert nbytes <= 18 * (5 * 13 * 4 + ALIGNMENT)
        held = copies._files
        assert held is not None and all(
            torch.equal(held[file][name], tensor)
            for file, tensors in files.items() for name, tensor in tensors.items()
        )


def test_memory_that_cannot_be_pinned_is_named_with_its_size(pinned) -> None:
    with pytest.raises(MemoryError, match=r"pin 0\.50 GiB .*asynchronous_checkpoints"):
        PinnedArena().tensors([torch.empty(2**27, device="meta")])
