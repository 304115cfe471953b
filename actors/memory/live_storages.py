"""Which memory is alive: every storage that operators make while this watches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveStorages(TorchDispatchMode):
    """Watches operators, and attributes the memory of what they make to an owner.

    It sees what is alive for whatever reason: saved by autograd, by checkpoints that only keep
    inputs, or by a reference in Python.

    Args:
        others: tensors whose memory does not count, such as parameters.

    Attributes:
        owner: who makes what comes next.
    """

    def __init__(self, others: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.owner = 0
        self._entries: dict[int, tuple[StorageWeakRef, int, int]] = {}
        for tensor in others:
            storage = tensor.untyped_storage()
            self._entries[storage._cdata] = StorageWeakRef(storage), 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operator and take note of new storages."""
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                entry = self._entries.get(value.untyped_storage()._cdata)
                if entry is None or entry[0].expired():
                    self.give(value, self.owner)
        return result

    def give(self, tensor: torch.Tensor, owner: int) -> None:
        """Attribute a tensor's memory to an owner, whoever made it."""
        storage = tensor.untyped_storage()
        self._entries[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), owner

    def alive(self) -> Iterator[tuple[int, int]]:
        """(owner, bytes) of every storage that is alive."""
        for reference, size, owner in self._entries.values():
            if not reference.expired():
                yield owner, size
