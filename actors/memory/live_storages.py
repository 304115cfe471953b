"""Live storages by owner: every storage that operators create while the dispatch mode is active."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveStorages(TorchDispatchMode):
    """Dispatch mode that assigns the memory that operators create to the current owner. Memory
    counts as long as it is alive for any reason: saved by autograd, by checkpoints that keep only
    inputs, or by a reference in Python. Memory of ``others``, such as parameters, does not count.
    """

    def __init__(self, others: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._owner = 0
        self._entries: dict[int, tuple[StorageWeakRef, int, int]] = {}
        for tensor in others:
            storage = tensor.untyped_storage()
            self._entries[storage._cdata] = StorageWeakRef(storage), 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                entry = self._entries.get(value.untyped_storage()._cdata)
                if entry is None or entry[0].expired():
                    self.give(value, self._owner)
        return result

    def enter(self, owner: int) -> None:
        """Make an owner the current one; the first is 0."""
        self._owner = owner

    def give(self, tensor: torch.Tensor, owner: int) -> None:
        """Assign a tensor's memory to an owner."""
        storage = tensor.untyped_storage()
        self._entries[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), owner

    def alive(self) -> Iterator[tuple[int, int]]:
        """Yield (owner, bytes) of every live storage."""
        for reference, size, owner in self._entries.values():
            if not reference.expired():
                yield owner, size
