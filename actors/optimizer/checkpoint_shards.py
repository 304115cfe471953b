"""Checkpoint shards: what one rank writes and reads, as safetensors.

Tensors are stored under their name, or, by processes that have only a shard of each, under
the name and a range. Readers ask for any shard, whatever the shards are that were written. A file
is read only after its bytes were compared with the checksum that its writer took.
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


# A name and a range of it.
STORED_RANGE = re.compile(r"(.*)\[(\d+):(\d+):(\d+)\]")
# The names of a checkpoint's files: of the parameters and the optimizer state that a rank writes.
SHARD_FILE = re.compile(r"(model|optimizer)-rank\d+\.safetensors")
# Bytes that are read at once to compute a checksum.
CHECKSUM_BLOCK = 4 * 2**20
# Files that an error names.
PROBLEMS_SHOWN = 5
# Files whose checksums a process computes at the same time; hashing and reading leave the GIL.
CHECKSUM_THREADS = 8


class ShardFile(NamedTuple):
    """What a file must be.

    Attributes:
        size: in bytes.
        checksum: XXH3 of 128 bits of all its bytes, as 32 hexadecimal digits.
    """

    size: int
    checksum: str


class WrittenShard(NamedTuple):
    """A shard that is on disk: the names of its tensors, and what the file must be."""

    names: list[str]
    file: ShardFile


class Loaded(NamedTuple):
    """What a process has made of a checkpoint.

    Attributes:
        lacking: trainable parameters that it lacks.
        taken: names of what was read of it (:func:`stored_names`), optimizer state included.
    """

    lacking: list[str]
    taken: list[str]


def stored_names(index: Mapping[str, str]) -> set[str]:
    """Names of the tensors that a checkpoint has, in shards or whole."""
    matches = ((name, STORED_RANGE.fullmatch(name)) for name in index)
    return {name if match is None else match[1] for name, match in matches}


def write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> WrittenShard:
    """Write tensors to ``path`` and force them to disk. Not atomic by itself: a checkpoint
    counts only once its manifest is committed.

    Raises:
        CheckpointError: the disk is full, read-only, ...; says the path and the cause.
    """
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(host, path)
        with open(path, "rb") as file, ThreadPoolExecutor(1) as disk:
            os.fchmod(file.fileno(), FILE_MODE)  # safetensors makes it for its owner alone
            synced = disk.submit(os.fsync, file.fileno())
            written = _checksum_of_source(file, host)  # while the disk writes
            synced.result()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from None
    return WrittenShard(sorted(tensors), written)


def store_shard(location: str, file: str, tensors: dict[str, torch.Tensor]) -> WrittenShard:
    """:func:`write_shard` into a checkpoint's folder.

    Args:
        location: of the folder.
        file: its name there.
        tensors: by their stored names.

    Raises:
        CheckpointError: as from there, or the bucket cannot be written.
    """
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
    """What a file is.

    Raises:
        OSError: it cannot be read.
    """
    digest, size = _digest(), 0
    block = memoryview(bytearray(CHECKSUM_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
    return ShardFile(size, digest.hexdigest())


def _checksum_of_source(file: BinaryIO, tensors: Mapping[str, torch.Tensor]) -> ShardFile:
    """:func:`checksum` of a shard just written, from the tensors that it was written of: nothing is
    read back but its header, and bytes that were written wrongly do not fit either.

    Args:
        file: at its beginning: 8 bytes that say how long the JSON behind them is (safetensors'
            format), which says where the bytes of every tensor are.
        tensors: contiguous, in host memory.
    """
    length = file.read(8)
    header = file.read(int.from_bytes(length, "little"))
    digest = _digest(length + header)
    places = json.loads(header)
    places.pop("__metadata__", None)
    for name in sorted(places, key=lambda name: places[name]["data_offsets"]):
        tensor = tensors[name]
        flat = tensor.as_strided((tensor.numel(),), (1,))  # of one element strides may be any
        digest.update(flat.view(torch.uint8).numpy().data)
    return ShardFile(os.fstat(file.fileno()).st_size, digest.hexdigest())


def verify_shard(
    path: Path, expected: ShardFile, names: Collection[str], name: str | None = None
) -> None:
    """Compare a file with what was written.

    Args:
        path: the file.
        expected: what it must be.
        names: of tensors that it must have.
        name: of the file in errors; by default its path.

    Raises:
        CheckpointError: it is another one; says in what.
    """
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


# A file of a checkpoint as a local one, for the length of a block.
Reading = Callable[[str], contextlib.AbstractContextManager[Path]]


def verify_shards(
    folder: StorageFolder, files: Mapping[str, ShardFile], index: Mapping[str, str],
    chosen: Collection[str] | None = None, reading: Reading | None = None,
) -> None:
    """:func:`verify_shard` of several files at the same time.

    Args:
        folder: the checkpoint.
        files: what its files must be, by name.
        index: file name per stored name.
        chosen: the files to look at; None for all.
        reading: how a file is had; by default, and for no longer than that, from the folder.

    Raises:
        CheckpointError: naming the files that are others.
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
        more = len(problems) - PROBLEMS_SHOWN
        raise CheckpointError(
            "; ".join(problems[:PROBLEMS_SHOWN]) + (f"; and {more} more files" * (more > 0))
        )


def stored_shards(
    name: str, tensor: torch.Tensor, own: ParameterShard | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors under which a process's part of a tensor is stored: ``name`` itself if it
    has all of it, else ``name[dim:start:stop]`` for every range.

    Args:
        name: the full name in the checkpoint.
        tensor: what this process has of it.
        own: which ranges of which dimension that is; None if it is everything.
    """
    if own is None:
        yield name, tensor
        return
    ranges = own.ranges
    parts = tensor.split([stop - start for start, stop in ranges], own.dim)
    for part, (start, stop) in zip(parts, ranges, strict=True):
        if stop > start:
            yield f"{name}[{own.dim}:{start}:{stop}]", part


def copy_tensors(
    stored: Mapping[str, torch.Tensor], own: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Copy stored tensors into a model's, in place.

    Args:
        stored: by name.
        own: (name, tensor), where a name may occur more than once; those that are not stored
            stay as they are.

    Raises:
        CheckpointError: if shapes or dtypes differ; nothing was copied then.
    """
    pairs = [(name, stored[name], tensor) for name, tensor in own if name in stored]
    for name, there, target in pairs:
        if target.shape != there.shape:
            raise CheckpointError(
                f"{name} is {tuple(there.shape)} in the checkpoint, but {tuple(target.shape)} "
                "in the model"
            )
        if target.dtype != there.dtype:
            raise CheckpointError(
                f"{name} is {there.dtype} in the checkpoint, but {target.dtype} in the model"
            )
    with torch.no_grad():
        for _, there, target in pairs:
            target.copy_(there)
