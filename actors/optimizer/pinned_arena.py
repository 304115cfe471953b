"""Page-locked host memory for copies that stay for the next time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Offsets of tensors are multiples of so many bytes, whatever their dtypes.
ALIGNMENT = 64


class PinnedArena:
    """One block of page-locked memory for the copies of many tensors, as large as they are.

    Torch's allocator rounds each pinned tensor up to a power of two, and keeps what is freed. The
    block is registered with CUDA instead, and grows if tensors need more than before.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that are pinned."""
        return self._memory.nbytes

    def tensors(self, originals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return contiguous tensors in the arena with the shapes and dtypes of ``originals``. What
        was returned before is overwritten, and invalid if the arena grows.

        Raises:
            MemoryError: CUDA cannot pin as much.
        """
        offsets, end = [], 0
        for tensor in originals:
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        if end > self.nbytes:
            self._grow(end)
        return [
            self._memory[offset : offset + tensor.numel() * tensor.element_size()]
            .view(tensor.dtype).view(tensor.shape)
            for offset, tensor in zip(offsets, originals, strict=True)
        ]  # fmt: skip

    def _grow(self, nbytes: int) -> None:
        cuda: Any = torch.cuda.cudart()
        if self.nbytes:
            cuda.cudaHostUnregister(self._memory.data_ptr())
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        code = int(cuda.cudaHostRegister(memory.data_ptr(), nbytes, 0))
        if code:
            raise MemoryError(
                f"cannot pin {nbytes / 2**30:.2f} GiB of host memory: cudaHostRegister returned "
                f"{code}. asynchronous_checkpoints: false needs none"
            )
        self._memory = memory
