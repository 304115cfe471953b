"""Tensors of a checkpoint, readable by any process, however they were sharded when they were
written."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open

from raymm.actors.optimizer.checkpoint_shards import STORED_RANGE, ShardFile, verify_shards
from raymm.actors.storage.location import storage_folder
from raymm.errors import CheckpointError

if TYPE_CHECKING:
    from raymm.actors.sharding.tensor_plan import ParameterShard


class _Stored(NamedTuple):
    """Range of a tensor in a file; the whole tensor if ``stop`` is None."""

    start: int
    stop: int | None
    dim: int
    name: str
    file: str

    @property
    def end(self) -> int:
        assert self.stop is not None
        return self.stop


class StoredTensors:
    """Tensors of a checkpoint.

    Args:
        index: file name of each stored name; names as in
            :func:`raymm.actors.optimizer.checkpoint_shards.stored_shards`.
        files: expected size and checksum of the files. A file is verified before its first read.
    """

    def __init__(
        self, folder: str | os.PathLike[str], index: Mapping[str, str],
        files: Mapping[str, ShardFile],
    ) -> None:
        self._folder = storage_folder(folder)
        # Local files are kept, because each is read for many tensors.
        self._at_hand: dict[str, Path] = {}
        self._open = contextlib.ExitStack()
        self._opening = threading.Lock()
        weakref.finalize(self, self._open.close)
        self._index, self._files = index, files
        self._verified: set[str] = set()
        self._stored: dict[str, list[_Stored]] = {}
        for name, file in index.items():
            match = STORED_RANGE.fullmatch(name)
            if match is None:
                self._stored[name] = [_Stored(0, None, 0, name, file)]
                continue
            base, *numbers = match.groups()
            dim, start, stop = map(int, numbers)
            self._stored.setdefault(base, []).append(_Stored(start, stop, dim, name, file))
        for entries in self._stored.values():
            entries.sort()

    def optimizer_keys(self) -> dict[str, list[str]]:
        """Return the keys of the optimizer state for each parameter (``optimizer/module/name``)."""
        keys: dict[str, list[str]] = {}
        for name in self._stored:
            if name.startswith("optimizer/"):
                parameter, _, key = name.rpartition("/")
                keys.setdefault(parameter, []).append(key)
        return keys

    def read(self, shards: Mapping[str, ParameterShard | None]) -> dict[str, torch.Tensor]:
        """Read tensors, or shards of them. Names that are not stored are skipped. A shard of a
        scalar is the scalar. Raise a ``CheckpointError`` if a file is missing, damaged, or lacks a
        range."""
        needed = {
            file for name, shard in shards.items() if name in self._stored
            for file in self._files_of(name, shard)
        }
        if new := needed - self._verified:
            verify_shards(self._folder, self._files, self._index, new, self._reading)
            self._verified |= new
        with contextlib.ExitStack() as stack:
            files: dict[str, Any] = {}

            def opened(file: str) -> Any:
                if file not in files:
                    handle = safe_open(self._at_hand[file], framework="pt")
                    files[file] = stack.enter_context(handle)
                return files[file]

            return {
                name: self._read(name, shard, opened)
                for name, shard in shards.items()
                if name in self._stored
            }

    @contextlib.contextmanager
    def _reading(self, file: str) -> Iterator[Path]:
        """Yield a local file, which is kept afterwards."""
        with contextlib.ExitStack() as stack:
            path = stack.enter_context(self._folder.reading(file))
            with self._opening:
                self._open.push(stack.pop_all())
        self._at_hand[file] = path
        yield path

    def _files_of(self, name: str, own: ParameterShard | None) -> set[str]:
        entries = self._stored[name]
        if own is None or entries[0].stop is None or own.dim != entries[0].dim:
            return {entry.file for entry in entries}
        files = {
            entry.file for entry in entries for start, stop in own.ranges
            if max(start, entry.start) < min(stop, entry.end)
        }
        return files or {entries[0].file}

    def _read(
        self, name: str, own: ParameterShard | None, opened: Callable[[str], Any]
    ) -> torch.Tensor:
        entries = self._stored[name]
        file = entries[0].file
        try:
            if entries[0].stop is None:
                view = opened(file).get_slice(entries[0].name)
                if own is None or not view.get_shape():
                    return opened(file).get_tensor(entries[0].name)
                return _ranges(view, own)
            dim = entries[0].dim
            alike = own if own is not None and own.dim == dim else None
            ranges = ((0, max(entry.end for entry in entries)),) if alike is None else alike.ranges
            slices = []
            for start, stop in ranges:
                position = start
                for entry in entries:
                    low, high = max(position, entry.start), min(stop, entry.end)
                    if low == position and low < high:
                        file, position = entry.file, high
                        view = opened(file).get_slice(entry.name)
                        slices.append(_along(view, dim, low - entry.start, high - entry.start))
                if position < stop:
                    raise CheckpointError(f"{self._folder} lacks [{position}, {stop}) of {name}")
            if not slices:
                slices = [_along(opened(file).get_slice(entries[0].name), dim, 0, 0)]
            joined = torch.cat(slices, dim)
            return joined if own is None or alike is not None else _ranges(joined, own)
        except CheckpointError:
            raise
        except Exception as error:  # OSError, or safetensors' own error type
            raise CheckpointError(f"cannot read {self._folder / file}: {error}") from None


def _ranges(view: Any, own: ParameterShard) -> torch.Tensor:
    return torch.cat([_along(view, own.dim, *bounds) for bounds in own.ranges], own.dim)


def _along(view: Any, dim: int, start: int, stop: int) -> torch.Tensor:
    return view[(slice(None),) * dim + (slice(start, stop),)]
