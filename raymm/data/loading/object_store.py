"""Tensors in Ray's object store at the price of one copy in and one copy out.

Ray pickles a CPU tensor through torch's storage format. As NumPy buffers the same bytes travel
out of band through shared memory.
"""

from collections.abc import Sequence

import numpy as np
import torch


class ItemStack:
    """Items of one shape and dtype that are not stacked yet.

    Inside ``StoredTensors`` they are stacked where they are taken out, in the copy that is made
    there anyway, which saves the one of ``torch.stack``.

    Args:
        items: at least one CPU tensor.
    """

    def __init__(self, items: Sequence[torch.Tensor]):
        self.items = list(items)
        self.dtype = self.items[0].dtype
        self.shape = torch.Size((len(self.items), *self.items[0].shape))

    def __getitem__(self, order: torch.Tensor) -> "ItemStack":
        """The items in another order, (n,) int64."""
        return ItemStack([self.items[i] for i in order.tolist()])


class StoredTensors(dict):
    """A dict of CPU tensors to give to Ray; ``ray.get`` gives a plain dict of tensors.

    The tensors that come out own their memory, because the object store's pages are read-only
    and an in-place operation on them would kill the process. An ``ItemStack`` comes out as what
    ``torch.stack`` makes of its items.
    """

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
