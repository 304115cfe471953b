"""Transfer of tensors through the Ray object store with one copy in and one copy out.

Ray pickles CPU tensors in the storage format of torch. As NumPy buffers, the same bytes are
transferred out of band through shared memory.
"""

from collections.abc import Sequence

import numpy as np
import torch


class ItemStack:
    """Items of one shape and dtype that are stacked later, when ``StoredTensors`` are unpacked.
    Unpacking copies the items anyway, so this saves the copy of ``torch.stack``."""

    def __init__(self, items: Sequence[torch.Tensor]):
        self.items = list(items)
        self.dtype = self.items[0].dtype
        self.shape = torch.Size((len(self.items), *self.items[0].shape))

    def __getitem__(self, order: torch.Tensor) -> "ItemStack":
        """Return the items in another order, (n,) int64."""
        return ItemStack([self.items[i] for i in order.tolist()])


class StoredTensors(dict):
    """Dict of CPU tensors to pass to Ray; ``ray.get`` returns a plain dict of tensors. The returned
    tensors own their memory, because pages of the object store are read-only and an in-place
    operation on them would kill the process. An ``ItemStack`` is returned as a stacked tensor."""

    def __reduce__(self):
        packed = [
            (key, str(value.dtype), tuple(value.shape), [_bytes_of(item) for item in _items(value)])
            for key, value in self.items()
        ]
        return _unpack, (packed,)


def _items(value: torch.Tensor | ItemStack) -> list[torch.Tensor]:
    return value.items if isinstance(value, ItemStack) else [value]


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    # As bytes, since NumPy lacks some of torch's dtypes (bfloat16).
    return tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()


def _unpack(packed: list[tuple]) -> dict[str, torch.Tensor]:
    return {key: _joined(dtype, shape, items) for key, dtype, shape, items in packed}


def _joined(dtype: str, shape: tuple[int, ...], items: list[np.ndarray]) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
    if tensor.numel():
        np.concatenate(items, out=tensor.view(-1).view(torch.uint8).numpy())
    return tensor
