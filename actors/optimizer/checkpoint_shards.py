"""Checkpoint shards: what one rank writes and reads, as safetensors.

Tensors are stored under their name, or, by processes that have only a piece of each, under
the name and a range. Readers ask for any piece, whatever the pieces are that were written. A file
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
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from raymm.errors import Error

if TYPE_CHECKING:
    from raymm.actors.sharding.tensor_plan import ParameterShard


_RANGE = re.compile(r"(.*)\[(\d+):(\d+):(\d+)\]")
# Bytes that are read at once to compute a checksum.
CHECKSUM_BLOCK = 4 * 2**20
# Files that an error names.
PROBLEMS_SHOWN = 5
# Files whose checksums a process computes at the same time; hashing and reading leave the GIL.
CHECKSUM_THREADS = 8


class ShardError(Error, RuntimeError):
    """A checkpoint shard that is missing, torn, changed, or does not fit the plan; or that cannot
    be written. Names the file."""


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
    """Names of the tensors that a checkpoint has, in pieces or whole."""
    matches = ((name, _RANGE.fullmatch(name)) for name in index)
    return {name if match is None else match[1] for name, match in matches}


def write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> WrittenShard:
    """Write tensors to ``path`` and force them to disk. Not atomic by itself: a checkpoint
    counts only once its manifest is committed.

    Raises:
        ShardError: the disk is full, read-only, ...; says the path and the cause.
    """
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(host, path)
        with open(path, "rb") as file, ThreadPoolExecutor(1) as disk:
            synced = disk.submit(os.fsync, file.fileno())
            written = _checksum_of_source(file, host)  # while the disk writes
            synced.result()
    except (OSError, SafetensorError) as error:
        raise ShardError(f"cannot write {path}: {error}") from None
    return WrittenShard(sorted(tensors), written)


def checksum(path: Path) -> ShardFile:
    """What a file is.

    Raises:
        OSError: it cannot be read.
    """
    digest, size = xxhash.xxh3_128(), 0
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
    digest = xxhash.xxh3_128(length + header)
    places = json.loads(header)
    places.pop("__metadata__", None)
    for name in sorted(places, key=lambda name: places[name]["data_offsets"]):
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return ShardFile(os.fstat(file.fileno()).st_size, digest.hexdigest())


def verify_shard(path: Path, expected: ShardFile, names: Collection[str]) -> None:
    """Compare a file with what was written.

    Args:
        path: the file.
        expected: what it must be.
        names: of tensors that it must have.

    Raises:
        ShardError: it is another one; says in what.
    """
    try:
        if not path.is_file():
            raise ShardError(f"{path} is missing, or no file")
        if (size := path.stat().st_size) != expected.size:
            raise ShardError(f"{path} has {size} bytes; {expected.size} were written")
        if (found := checksum(path)) != expected:
            raise ShardError(
                f"{path} has checksum {found.checksum}; {expected.checksum} was written: its "
                "bytes have changed since"
            )
        with safe_open(path, framework="pt") as file:
            if lacking := sorted(set(names) - set(file.keys())):
                raise ShardError(f"{path} lacks {lacking[0]}, which the manifest says it has")
    except (OSError, SafetensorError) as error:
        raise ShardError(f"cannot read {path}: {error}") from None


def verify_shards(
    folder: Path, files: Mapping[str, ShardFile], index: Mapping[str, str],
    chosen: Collection[str] | None = None,
) -> None:
    """:func:`verify_shard` of several files at the same time.

    Args:
        folder: the checkpoint.
        files: what its files must be, by name.
        index: file name per stored name.
        chosen: the files to look at; None for all.

    Raises:
        ShardError: naming the files that are others.
    """
    names: dict[str, list[str]] = {file: [] for file in files}
    for name, file in index.items():
        names[file].append(name)
    looked_at = sorted(files if chosen is None else chosen)

    def problem(file: str) -> str | None:
        try:
            verify_shard(folder / file, files[file], names[file])
        except ShardError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(max(1, min(CHECKSUM_THREADS, len(looked_at)))) as pool:
        problems = [found for found in pool.map(problem, looked_at) if found is not None]
    if problems:
        more = len(problems) - PROBLEMS_SHOWN
        raise ShardError(
            "; ".join(problems[:PROBLEMS_SHOWN]) + (f"; and {more} more files" * (more > 0))
        )


def stored_shards(
    name: str, tensor: torch.Tensor, piece: ParameterShard | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors under which a process's part of a tensor is stored: ``name`` itself if it
    has all of it, else ``name[dim:start:stop]`` for every range."""
    if piece is None:
        yield name, tensor
        return
    ranges = piece.ranges
    parts = tensor.split([stop - start for start, stop in ranges], piece.dim)
    for part, (start, stop) in zip(parts, ranges, strict=True):
        if stop > start:
            yield f"{name}[{piece.dim}:{start}:{stop}]", part


class _Stored(NamedTuple):
    """A range of a tensor as a file has it; all of it where ``stop`` is None."""

    start: int
    stop: int | None
    dim: int
    name: str
    file: str

    @property
    def end(self) -> int:
        """``stop`` of a range."""
        assert self.stop is not None
        return self.stop


class StoredTensors:
    """The tensors of a checkpoint, whoever wrote which part of them.

    Args:
        folder: the checkpoint.
        index: file name per stored name (:func:`stored_shards`).
        files: what the files must be. One is verified before the first read of it.
    """

    def __init__(
        self, folder: Path, index: Mapping[str, str], files: Mapping[str, ShardFile]
    ) -> None:
        self._folder = folder
        self._index, self._files = index, files
        self._verified: set[str] = set()
        self._stored: dict[str, list[_Stored]] = {}
        for name, file in index.items():
            match = _RANGE.fullmatch(name)
            if match is None:
                self._stored[name] = [_Stored(0, None, 0, name, file)]
                continue
            base, *numbers = match.groups()
            dim, start, stop = map(int, numbers)
            self._stored.setdefault(base, []).append(_Stored(start, stop, dim, name, file))
        for parts in self._stored.values():
            parts.sort()

    def optimizer_keys(self) -> dict[str, list[str]]:
        """Per parameter (``optimizer/module/name``), what the optimizer keeps of it."""
        keys: dict[str, list[str]] = {}
        for name in self._stored:
            if name.startswith("optimizer/"):
                parameter, _, key = name.rpartition("/")
                keys.setdefault(parameter, []).append(key)
        return keys

    def read(self, wanted: Mapping[str, ParameterShard | None]) -> dict[str, torch.Tensor]:
        """Read tensors, or pieces of them.

        Args:
            wanted: by name; names that are not stored are left out. A piece of a scalar is
                the scalar.

        Raises:
            ShardError: if a file is missing, torn, changed, or lacks a range.
        """
        needed = {
            file for name, piece in wanted.items() if name in self._stored
            for file in self._files_of(name, piece)
        }
        if new := needed - self._verified:
            verify_shards(self._folder, self._files, self._index, new)
            self._verified |= new
        with contextlib.ExitStack() as stack:
            files: dict[str, Any] = {}

            def opened(file: str) -> Any:
                if file not in files:
                    handle = safe_open(self._folder / file, framework="pt")
                    files[file] = stack.enter_context(handle)
                return files[file]

            return {
                name: self._read(name, piece, opened)
                for name, piece in wanted.items()
                if name in self._stored
            }

    def _files_of(self, name: str, piece: ParameterShard | None) -> set[str]:
        """Files that have something of a piece of a tensor."""
        parts = self._stored[name]
        if piece is None or parts[0].stop is None or piece.dim != parts[0].dim:
            return {part.file for part in parts}
        found = {
            part.file for part in parts for start, stop in piece.ranges
            if max(start, part.start) < min(stop, part.end)
        }
        return found or {parts[0].file}

    def _read(
        self, name: str, piece: ParameterShard | None, opened: Callable[[str], Any]
    ) -> torch.Tensor:
        parts = self._stored[name]
        file = parts[0].file
        try:
            if parts[0].stop is None:
                view = opened(file).get_slice(parts[0].name)
                if piece is None or not view.get_shape():
                    return opened(file).get_tensor(parts[0].name)
                return _ranges(view, piece)
            dim = parts[0].dim
            alike = piece if piece is not None and piece.dim == dim else None
            ranges = ((0, max(part.end for part in parts)),) if alike is None else alike.ranges
            taken = []
            for start, stop in ranges:
                at = start
                for part in parts:
                    low, high = max(at, part.start), min(stop, part.end)
                    if low == at and low < high:
                        file, at = part.file, high
                        view = opened(file).get_slice(part.name)
                        taken.append(_along(view, dim, low - part.start, high - part.start))
                if at < stop:
                    raise ShardError(f"{self._folder} lacks [{at}, {stop}) of {name}")
            if not taken:
                taken = [_along(opened(file).get_slice(parts[0].name), dim, 0, 0)]
            whole = torch.cat(taken, dim)
            return whole if piece is None or alike is not None else _ranges(whole, piece)
        except ShardError:
            raise
        except Exception as error:  # OSError, or safetensors' own error type
            raise ShardError(f"cannot read {self._folder / file}: {error}") from None


def _ranges(view: Any, piece: ParameterShard) -> torch.Tensor:
    return torch.cat([_along(view, piece.dim, *one) for one in piece.ranges], piece.dim)


def _along(view: Any, dim: int, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) along a dimension of a tensor in a file."""
    return view[(slice(None),) * dim + (slice(start, stop),)]


def copy_tensors(
    stored: Mapping[str, torch.Tensor], own: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Copy stored tensors into a model's, in place.

    Args:
        stored: by name.
        own: (name, tensor), where a name may occur more than once; those that are not stored
            stay as they are.

    Raises:
        ShardError: if shapes or dtypes differ; nothing was copied then.
    """
    pairs = [(name, stored[name], tensor) for name, tensor in own if name in stored]
    for name, there, here in pairs:
        if here.shape != there.shape:
            raise ShardError(
                f"{name} is {tuple(there.shape)} in the checkpoint, but {tuple(here.shape)} "
                "in the model"
            )
        if here.dtype != there.dtype:
            raise ShardError(
                f"{name} is {there.dtype} in the checkpoint, but {here.dtype} in the model"
            )
    with torch.no_grad():
        for _, there, here in pairs:
            here.copy_(there)
