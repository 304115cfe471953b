"""Tensors in Ray's object store at the price of one copy in and one copy out.

Ray pickles a CPU tensor through torch's storage format. As NumPy buffers the same bytes travel
out of band through shared memory.
"""

import numpy as np
import torch


class StoredTensors(dict):
    """A dict of CPU tensors to ``ray.put``; ``ray.get`` gives a plain dict of tensors.

    The tensors that come out own their memory, because the object store's pages are read-only
    and an in-place operation on them would kill the process.
    """

    def __reduce__(self):
        packed = [
            (key, str(value.dtype), tuple(value.shape), _bytes_of(value))
            for key, value in self.items()
        ]
        return _unpack, (packed,)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    # As bytes, since NumPy lacks some of torch's dtypes (bfloat16).
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def _unpack(packed: list[tuple]) -> dict[str, torch.Tensor]:
    return {
        key: torch.from_numpy(data.copy())
        .view(getattr(torch, dtype.removeprefix("torch.")))
        .reshape(shape)
        for key, dtype, shape, data in packed
    }
