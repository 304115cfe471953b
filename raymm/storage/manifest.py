"""Manifest of a checkpoint: its content, and the sizes and checksums of its files.

Checksums are computed from pages in memory while the disk writes them. Every process verifies the
files that it reads. A corrupt checkpoint is reported and never deleted; if a new checkpoint needs
its place, it is renamed.
"""

from __future__ import annotations

import json
import os
import re
from typing import Annotated, Any, Literal

import xxhash
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from raymm.actors.optimizer.checkpoint_shards import ShardFile, verify_shards
from raymm.actors.storage.location import storage_folder
from raymm.errors import CheckpointError
from raymm.files.run_files import writing

CHECKPOINT_FORMAT = 2
MANIFEST = "manifest.json"

# A file next to the manifest: without folder, parent or leading dot.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FileEntry(_Strict):
    """Size of a shard in bytes, and its 128-bit XXH3 checksum."""

    size: int = Field(ge=0)
    xxh3_128: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class Manifest(_Strict):
    """Content of a checkpoint.

    Attributes:
        run: description of the run (:func:`raymm.storage.run_description.describe_run`), compared
            when the run resumes; empty outside of a trainer's run.
        trainer: state of the trainer (position in the data, states of hooks).
        kernels: attention kernels of the run, by class of shapes.
    """

    format: Literal[2] = CHECKPOINT_FORMAT
    step: int = Field(ge=0)
    index: dict[str, str]
    files: dict[str, FileEntry]
    plan: dict[str, Any]
    run: dict[str, Any]
    trainer: dict[str, Any]
    kernels: dict[str, str] = {}

    @model_validator(mode="after")
    def _names_are_files_here(self) -> Manifest:
        for name in self.files:
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"files has {name!r}; accepted: NAME.safetensors, without folder")
        if unknown := sorted(set(self.index.values()) - set(self.files)):
            raise ValueError(f"index has file {unknown[0]!r}, which files lacks")
        return self

    @property
    def shards(self) -> dict[str, ShardFile]:
        """Files in the form that readers of shards take."""
        return {name: ShardFile(file.size, file.xxh3_128) for name, file in self.files.items()}


def write_manifest(folder: str | os.PathLike[str], manifest: Manifest) -> None:
    """Commit a checkpoint whose shards are written, atomically. Raise a ``RunFileError`` if the
    manifest cannot be written, so the checkpoint does not count."""
    text = json.dumps(manifest.model_dump())
    values = {"checksum": _checksum(json.loads(text)), **json.loads(text)}
    storage = storage_folder(folder)
    with writing(storage / MANIFEST):
        storage.replace(MANIFEST, json.dumps(values).encode())


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of a checkpoint. Readers verify shards
    (:class:`raymm.actors.optimizer.stored_tensors.StoredTensors`), as does
    :func:`verify_checkpoint`. Raise a ``CheckpointError`` if the manifest is missing, of another
    format, or not as written."""
    storage = storage_folder(folder)
    path = storage / MANIFEST
    try:
        values = json.loads(storage.read(MANIFEST).decode(), object_pairs_hook=_once)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: not a checkpoint, or a damaged one"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a field occurs twice
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object")
    if (version := values.get("format")) != CHECKPOINT_FORMAT:
        raise CheckpointError(
            f"{path}: format is {version!r:.80}; this raymm reads {CHECKPOINT_FORMAT}, which has "
            "checksums. Export it with the raymm that wrote it, or set another storage_path"
        )
    stated, expected = values.pop("checksum", None), _checksum(values)
    if stated != expected:
        raise CheckpointError(
            f"{path} was changed after it was written: it states the checksum {stated!r:.80}, "
            f"but its content has {expected!r}. If you edited it on purpose, write that checksum "
            "into it"
        )
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise CheckpointError(
            f"{path} is damaged: {where}: {first['msg'].removeprefix('Value error, ')}"
        ) from None


def verify_checkpoint(folder: str | os.PathLike[str], manifest: Manifest) -> None:
    """Compare every byte of a checkpoint's shards with their checksums, several files at a time.
    Raise a ``CheckpointError`` if files are missing or differ. Names them."""
    verify_shards(storage_folder(folder), manifest.shards, manifest.index)


def _checksum(values: dict[str, Any]) -> str:
    """Return a checksum of a manifest's values, independent of their layout in the file."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode()).hexdigest()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has the field {twice!r:.80} more than once in an object")
    return values
