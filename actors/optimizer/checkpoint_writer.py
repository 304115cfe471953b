"""What a process does for a checkpoint: write what it has, at once; or copy it to host memory, and
write the copy while steps go on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from raymm.actors.optimizer.checkpoint_shards import (
    STORED_RANGE,
    ShardError,
    WrittenShard,
    store_shard,
)
from raymm.actors.optimizer.finite import not_finite
from raymm.actors.optimizer.pinned_arena import PinnedArena

Files = dict[str, dict[str, torch.Tensor]]
"""Tensors by their stored names, by file."""


class WrittenCopy(NamedTuple):
    """What has become of a copy.

    Attributes:
        shards: what is on disk, per file; nothing if something is not finite.
        not_finite: names, as in checkpoints, of tensors with values that are not finite, and how
            many.
    """

    shards: dict[str, WrittenShard]
    not_finite: list[str]


class HostCopy:
    """A copy in host memory of what is saved, at most one at a time.

    On a GPU it is made by the device, in the order of its work, into pinned memory that is kept for
    the next one: pinning takes longer than copying. On a CPU its memory is given back once it is
    written.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._arena = PinnedArena() if device.type == "cuda" else None
        self._files: Files | None = None
        self._copied: torch.cuda.Event | None = None

    def copy(self, files: Files) -> int:
        """Copy them; tensors may change once this returns, as far as that is in the order of the
        device's current stream. Returns bytes."""
        names = [(file, name) for file, tensors in files.items() for name in tensors]
        originals = [files[file][name].detach() for file, name in names]
        if self._arena is None:
            targets = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in originals]
        else:
            targets = self._arena.tensors(originals)
        self._files = {file: {} for file in files}
        for (file, name), target, tensor in zip(names, targets, originals, strict=True):
            self._files[file][name] = target.copy_(tensor, non_blocking=True)
        if self._arena is not None:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return sum(target.nbytes for target in targets)

    def write(self, location: str) -> WrittenCopy:
        """Write what was copied last; in any thread.

        Args:
            location: of an existing folder that is not committed yet.

        Raises:
            ShardError: it cannot be written, or there is none.
        """
        files, self._files = self._files, None
        if files is None:
            raise ShardError(f"there is nothing to write into {location}")
        if self._copied is not None:
            self._copied.synchronize()
        if names := not_finite(_whole_names(files)):
            return WrittenCopy({}, names)
        shards = {}
        for file in list(files):  # what is written needs no memory any more
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
    """Part of actors that have something to save."""

    _host_copy: HostCopy | None = None

    @property
    @abstractmethod
    def _saved_device(self) -> torch.device:
        """Where it is."""

    @abstractmethod
    def _files_to_save(self, skip_frozen: frozenset[str]) -> Files:
        """This process's part; of what several processes have, one has it in there.

        Args:
            skip_frozen: modules whose frozen weights are elsewhere and need no copy.
        """

    def save(self, folder: str, skip_frozen: frozenset[str]) -> dict[str, WrittenShard]:
        """Write this process's shards; returns what is in them, per file.

        Args:
            folder: location of an existing folder that is not committed yet.
            skip_frozen: modules whose frozen weights are elsewhere and need no copy.
        """
        return {
            file: store_shard(folder, file, _untie(tensors))
            for file, tensors in self._files_to_save(skip_frozen).items()
        }

    def copy_state(self, skip_frozen: frozenset[str]) -> int:
        """Copy to host memory what :meth:`save` writes, for :meth:`write_copy`; returns bytes."""
        if self._host_copy is None:
            self._host_copy = HostCopy(self._saved_device)
        return self._host_copy.copy(self._files_to_save(skip_frozen))

    def write_copy(self, folder: str) -> WrittenCopy:
        """Write what was copied last, in a thread of its own.

        Args:
            folder: location of an existing folder that is not committed yet.
        """
        if self._host_copy is None:
            raise ShardError(f"there is nothing to write into {folder}")
        return self._host_copy.write(folder)


def _untie(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Safetensors refuses tensors that share memory; tied ones are written once each."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        pointer = tensor.data_ptr()
        result[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return result
