"""Checkpoint shards: files that one rank writes and reads, as safetensors.

A tensor is stored under its name, or under its name and a range if a process holds only a shard.
Readers can read any shard, however the tensor was sharded when it was written. A file is read only
after its bytes were verified against the writer's checksum.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from raymm.actors.storage.folder import FILE_MODE, StorageFolder
from raymm.actors.storage.location import storage_folder
from raymm.errors import CheckpointError

if TYPE_CHECKING:
    from raymm.actors.sharding.tensor_plan import ParameterShard


from abc import ABC, abstractmethod
from concurrent.futures import Future

from raymm.actors.optimizer.finite import not_finite
from raymm.actors.optimizer.host_staging import HostStaging

# Stored name of a range of a tensor.
STORED_RANGE = re.compile(r"(.*)\[(\d+):(\d+):(\d+)\]")
# File names of the parameters and the optimizer state that a rank writes.
SHARD_FILE = re.compile(r"(model|optimizer)-rank\d+\.safetensors")
# Bytes per read when computing a checksum.
CHECKSUM_BLOCK = 4 * 2**20
# Largest number of files that an error names.
PROBLEMS_SHOWN = 5
# Number of files whose checksums are computed in parallel; hashing and reading release the GIL.
CHECKSUM_THREADS = 8


class ShardFile(NamedTuple):
    """Expected size of a file in bytes, and 128-bit XXH3 of all bytes as 32 hexadecimal digits."""

    size: int
    checksum: str


class WrittenShard(NamedTuple):
    """Shard that was written: the names of its tensors, and size and checksum of the file."""

    names: list[str]
    file: ShardFile


class Loaded(NamedTuple):
    """Trainable parameters that a checkpoint lacks, and names of all tensors that were read from it
    (:func:`stored_names`), including optimizer state."""

    lacking: list[str]
    taken: list[str]


def stored_names(index: Mapping[str, str]) -> set[str]:
    """Return the names of a checkpoint's tensors, without ranges."""
    matches = ((name, STORED_RANGE.fullmatch(name)) for name in index)
    return {name if match is None else match[1] for name, match in matches}


def write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> WrittenShard:
    """Write tensors to ``path`` and force them to disk. Not atomic by itself: a checkpoint is valid
    only once its manifest is committed. Raise a ``CheckpointError`` if the file cannot be written;
    names the path and the cause."""
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(host, path)
        with open(path, "rb") as file, ThreadPoolExecutor(1) as disk:
            os.fchmod(file.fileno(), FILE_MODE)  # safetensors creates it readable by its owner only
            synced = disk.submit(os.fsync, file.fileno())
            written = _checksum_of_source(file, host)  # while the disk writes
            synced.result()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from None
    return WrittenShard(sorted(tensors), written)


def store_shard(location: str, file: str, tensors: dict[str, torch.Tensor]) -> WrittenShard:
    """Write a shard into a checkpoint's folder; see :func:`write_shard`. Raise a
    ``CheckpointError`` if the file or the bucket cannot be written."""
    folder = storage_folder(location)
    try:
        with folder.writing(file) as path:
            return write_shard(path, tensors)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder / file}: {error}") from None


def _digest(start: bytes = b"") -> Any:
    import xxhash  # a rank that writes no checkpoint does not need it

    return xxhash.xxh3_128(start)


def checksum(path: Path) -> ShardFile:
    """Return size and checksum of a file. Raise an ``OSError`` if the file cannot be read."""
    digest, size = _digest(), 0
    block = memoryview(bytearray(CHECKSUM_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
    return ShardFile(size, digest.hexdigest())


def _checksum_of_source(file: BinaryIO, tensors: Mapping[str, torch.Tensor]) -> ShardFile:
    """Compute the :func:`checksum` of a shard from its header and the tensors in host memory. Only
    the header is read back, so bytes that were written wrongly do not match. The safetensors format
    starts with the length of the JSON header in 8 bytes; the header has the offsets of every
    tensor."""
    length = file.read(8)
    header = file.read(int.from_bytes(length, "little"))
    digest = _digest(length + header)
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    for name in sorted(entries, key=lambda name: entries[name]["data_offsets"]):
        tensor = tensors[name]
        # a tensor of one element may have any strides
        flat = tensor.as_strided((tensor.numel(),), (1,))
        digest.update(flat.view(torch.uint8).numpy().data)
    return ShardFile(os.fstat(file.fileno()).st_size, digest.hexdigest())


def verify_shard(
    path: Path, expected: ShardFile, names: Collection[str], name: str | None = None
) -> None:
    """Verify a file against its expected size, checksum and tensors; ``name`` replaces its path in
    errors. Raise a ``CheckpointError`` if the file differs; says how."""
    name = name or str(path)
    try:
        if not path.is_file():
            raise CheckpointError(f"{name} is missing or not a file")
        if (size := path.stat().st_size) != expected.size:
            raise CheckpointError(f"{name} has {size} bytes; {expected.size} were written")
        if (actual := checksum(path)) != expected:
            raise CheckpointError(
                f"{name} has checksum {actual.checksum}; {expected.checksum} was written: its "
                "bytes have changed since"
            )
        with safe_open(path, framework="pt") as file:
            if lacking := sorted(set(names) - set(file.keys())):
                raise CheckpointError(f"{name} lacks {lacking[0]}, which the manifest lists")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {name}: {error}") from None


# Provides a file of a checkpoint as a local file for the length of a block.
Reading = Callable[[str], contextlib.AbstractContextManager[Path]]


def verify_shards(
    folder: StorageFolder, files: Mapping[str, ShardFile], index: Mapping[str, str],
    chosen: Collection[str] | None = None, reading: Reading | None = None,
) -> None:
    """Verify several files in parallel; see :func:`verify_shard`. Raise a ``CheckpointError`` if
    some files differ; names them.

    Args:
        reading: provides a local copy of a file; by default ``folder.reading``.
    """
    names: dict[str, list[str]] = {file: [] for file in files}
    for name, file in index.items():
        names[file].append(name)
    looked_at = sorted(files if chosen is None else chosen)
    reading = reading or folder.reading

    def problem(file: str) -> str | None:
        name = str(folder / file)
        try:
            with reading(file) as path:
                verify_shard(path, files[file], names[file], name)
        except CheckpointError as error:
            return str(error)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"cannot read {name}: {error}"
        return None

    with ThreadPoolExecutor(max(1, min(CHECKSUM_THREADS, len(looked_at)))) as pool:
        problems = [text for text in pool.map(problem, looked_at) if text is not None]
    if problems:
        omitted = len(problems) - PROBLEMS_SHOWN
        raise CheckpointError(
            "; ".join(problems[:PROBLEMS_SHOWN]) + (f"; and {omitted} more files" * (omitted > 0))
        )


def stored_shards(
    name: str, tensor: torch.Tensor, own: ParameterShard | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors under which a process's part of a tensor is stored: ``name``
    itself for the whole tensor (``own`` is None), else ``name[dim:start:stop]`` for every range."""
    if own is None:
        yield name, tensor
        return
    ranges = own.ranges
    shards = tensor.split([stop - start for start, stop in ranges], own.dim)
    for shard, (start, stop) in zip(shards, ranges, strict=True):
        if stop > start:
            yield f"{name}[{own.dim}:{start}:{stop}]", shard


def copy_tensors(
    stored: Mapping[str, torch.Tensor], own: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Copy stored tensors into a model's (name, tensor) pairs, in place. A name may occur more than
    once; tensors that are not stored are unchanged. Raise a ``CheckpointError`` if shapes or dtypes
    differ; nothing was copied then."""
    pairs = [(name, stored[name], tensor) for name, tensor in own if name in stored]
    for name, source, target in pairs:
        if target.shape != source.shape:
            raise CheckpointError(
                f"{name} is {tuple(source.shape)} in the checkpoint, but {tuple(target.shape)} "
                "in the model"
            )
        if target.dtype != source.dtype:
            raise CheckpointError(
                f"{name} is {source.dtype} in the checkpoint, but {target.dtype} in the model"
            )
    with torch.no_grad():
        for _, source, target in pairs:
            target.copy_(source)


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
