"""What a process does for a checkpoint: write what it has, at once; or copy it to host memory, and
write the copy while steps go on."""

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
"""Tensors by their stored names, by file."""


class Saved(NamedTuple):
    """What a process saves.

    Attributes:
        files: the tensors as they are in memory.
        widened: names of those that files have in fp32.
        temporary: True if some of the tensors were made to be saved.
    """

    files: Files
    widened: frozenset[str] = frozenset()
    temporary: bool = False


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
    """A copy in host memory of what is saved, at most one at a time; its memory is returned once it
    is written.

    Args:
        staging: copies the tensors.
    """

    def __init__(self, staging: HostStaging) -> None:
        self._staging = staging
        self._names: list[tuple[str, str]] | None = None
        self._tensors: Future[list[torch.Tensor]] = Future()

    def copy(self, saved: Saved) -> int:
        """Begin to copy tensors, which may change once :meth:`HostStaging.wait` has returned.
        Return the bytes of the copies."""
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
        """Write what was copied last; in any thread.

        Args:
            location: of an existing folder that is not committed yet.

        Raises:
            CheckpointError: it cannot be written, or there is none.
        """
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

    _staging: HostStaging
    _host_copy: HostCopy | None = None

    @abstractmethod
    def _files_to_save(self, skip_frozen: frozenset[str]) -> Saved:
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
        """Begin to copy to host memory what :meth:`save` writes, for :meth:`write_copy`. Return the
        bytes of the copy."""
        if self._host_copy is None:
            self._host_copy = HostCopy(self._staging)
        return self._host_copy.copy(self._files_to_save(skip_frozen))

    def write_copy(self, folder: str) -> WrittenCopy:
        """Write what was copied last, in a thread of its own.

        Args:
            folder: location of an existing folder that is not committed yet.
        """
        if self._host_copy is None:
            raise CheckpointError(f"there is no copied state to write into {folder}")
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
