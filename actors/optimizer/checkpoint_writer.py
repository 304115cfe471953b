"""Writing of a process's checkpoint files: at once, or from a copy in host memory during
training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import NamedTuple

import torch

from raymm.actors.optimizer.checkpoint_shards import STORED_RANGE, WrittenShard, store_shard
from raymm.actors.optimizer.finite import not_finite
from raymm.actors.optimizer.host_staging import HostStaging
from raymm.errors import CheckpointError

Files = dict[str, dict[str, torch.Tensor]]
"""Tensors by stored name, by file name."""


class Saved(NamedTuple):
    """State that a process saves.

    Attributes:
        widened: names of tensors that files store in fp32.
        temporary: True if some tensors were created for this save.
    """

    files: Files
    widened: frozenset[str] = frozenset()
    temporary: bool = False


class WrittenCopy(NamedTuple):
    """Result of writing a copy.

    Attributes:
        shards: written shards by file; empty if a value is not finite.
        not_finite: checkpoint names of tensors with non-finite values, each with their number.
    """

    shards: dict[str, WrittenShard]
    not_finite: list[str]


class HostCopy:
    """Copy of saved state in host memory, at most one at a time, whose memory is released once
    written."""

    def __init__(self, staging: HostStaging) -> None:
        self._staging = staging
        self._names: list[tuple[str, str]] | None = None
        self._tensors: Future[list[torch.Tensor]] = Future()

    def copy(self, saved: Saved) -> int:
        """Start copying tensors; return the bytes of the copies. The tensors may change once
        :meth:`HostStaging.wait` has returned."""
        named = [
            (file, name, tensor)
            for file, tensors in saved.files.items()
            for name, tensor in tensors.items()
        ]
        dtypes = [
            torch.float32 if name in saved.widened else tensor.dtype for _, name, tensor in named
        ]
        self._names = [(file, name) for file, name, _ in named]
        self._tensors = self._staging.copy(
            [tensor for _, _, tensor in named], dtypes, saved.temporary
        )
        return sum(
            tensor.numel() * dtype.itemsize
            for (_, _, tensor), dtype in zip(named, dtypes, strict=True)
        )

    def write(self, location: str) -> WrittenCopy:
        """Write the last copy into an existing, uncommitted checkpoint folder. Callable from any
        thread. Raise a ``CheckpointError`` if the copy failed, cannot be written, or does not
        exist."""
        names, self._names = self._names, None
        if names is None:
            raise CheckpointError(f"there is no copied state to write into {location}")
        copied, self._tensors = self._tensors, Future()
        try:
            tensors = copied.result()
        except (MemoryError, RuntimeError) as error:
            raise CheckpointError(f"cannot copy the state for {location}: {error}") from None
        files: Files = {}
        for (file, name), tensor in zip(names, tensors, strict=True):
            files.setdefault(file, {})[name] = tensor
        del copied, tensors
        if names := not_finite(_whole_names(files)):
            return WrittenCopy({}, names)
        shards = {}
        for file in list(files):  # releases each file's tensors once it is written
            shards[file] = store_shard(location, file, files.pop(file))
        return WrittenCopy(shards, [])


def _whole_names(files: Mapping[str, Mapping[str, torch.Tensor]]) -> Iterator[
    tuple[str, torch.Tensor]
]:
    for tensors in files.values():
        for name, tensor in tensors.items():
            match = STORED_RANGE.fullmatch(name)
            yield name if match is None else match[1], tensor


class SavingActor(ABC):
    """Base of actors that write their shards of a checkpoint, at once or from a copy."""
    _staging: HostStaging
    _host_copy: HostCopy | None = None

    @abstractmethod
    def _files_to_save(self, skip_frozen: frozenset[str]) -> Saved:
        """Return this process's part of the state, without frozen weights of the modules
        ``skip_frozen``. State that several processes hold is in the part of one of them."""

    def save(self, folder: str, skip_frozen: frozenset[str]) -> dict[str, WrittenShard]:
        """Write this process's shards into an existing, uncommitted checkpoint folder; return them
        by file."""
        saved = self._files_to_save(skip_frozen)
        return {
            file: store_shard(
                folder,
                file,
                _untie(
                    {
                        name: tensor.float() if name in saved.widened else tensor
                        for name, tensor in tensors.items()
                    }
                ),
            )
            for file, tensors in saved.files.items()
        }

    def copy_state(self, skip_frozen: frozenset[str]) -> int:
        """Start copying the state that :meth:`save` writes to host memory; return the bytes of the
        copy."""
        if self._host_copy is None:
            self._host_copy = HostCopy(self._staging)
        return self._host_copy.copy(self._files_to_save(skip_frozen))

    def write_copy(self, folder: str) -> WrittenCopy:
        """Write the last copy, in a separate thread."""
        if self._host_copy is None:
            raise CheckpointError(f"there is no copied state to write into {folder}")
        return self._host_copy.write(folder)


def _untie(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Clone tied tensors, because safetensors rejects tensors that share memory."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        pointer = tensor.data_ptr()
        result[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return result
