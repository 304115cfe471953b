"""Current and peak bytes of live tensors, counted by the storages that operators create."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of storages until they are freed.

    On a CPU it replaces the statistics of a GPU's allocator. It counts exactly the live tensors,
    without memory that allocators cache or kernels allocate internally.

    Attributes:
        now, most: current bytes, and their peak since :meth:`restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref] = {}
        self._resize = torch.UntypedStorage.resize_

    def restart(self) -> None:
        self.most = self.now

    def note_all(self) -> None:
        """Count every tensor on the CPU that Python's garbage collector tracks."""
        for tensor in gc.get_objects():
            if issubclass(type(tensor), torch.Tensor):
                self._note(tensor)
                if tensor.is_leaf and tensor.grad is not None:  # it may have no Python object yet
                    self._note(tensor.grad)
        self.restart()

    def __enter__(self) -> LiveBytes:
        """Start counting, including storages that are resized (as FSDP does)."""
        resize = self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._count(storage)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs the operators of its local tensors
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._note(value)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or isinstance(tensor, DTensor):
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._count(storage)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, int(storage.nbytes())
        self.now += size - self._sizes.get(key, 0)
        self.most = max(self.most, self.now)
        self._sizes[key] = size
        if key not in self._references:
            self._references[key] = weakref.ref(storage, lambda _: self._gone(key))

    def _gone(self, key: int) -> None:
        del self._references[key]
        self.now -= self._sizes.pop(key)


class DeviceBytes:
    """Current and peak bytes of a GPU, from its allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    @property
    def most(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


@contextlib.contextmanager
def live_bytes(device: torch.device) -> Iterator[LiveBytes | DeviceBytes]:
    """Count the live bytes of a device for the length of the block."""
    if device.type == "cuda":
        yield DeviceBytes(device)
        return
    live = LiveBytes()
    live.note_all()
    with live:
        yield live


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
