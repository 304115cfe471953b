"""Inspection, comparison and pruning of the checkpoints of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from raymm.actors.optimizer.checkpoint_shards import stored_names
from raymm.actors.optimizer.stored_tensors import StoredTensors
from raymm.actors.storage.folder import StorageFolder
from raymm.actors.storage.location import storage_folder
from raymm.errors import CheckpointError
from raymm.storage.manifest import MANIFEST, Manifest
from raymm.storage.run_folder import RunFolder
from raymm.storage.step_folders import (
    CHECKPOINTS,
    drop,
    is_folder_name,
    is_torn,
    step_folders,
    verified_manifest,
)


@dataclass(frozen=True)
class CheckpointReport:
    """Result of inspecting a checkpoint.

    Attributes:
        problem: description of the damage; None if every byte is as written.
        torn: True for the remains of an unfinished save. They are never read, and removed when the
            run resumes.
    """

    folder: Path | str
    manifest: Manifest | None
    problem: str | None = None
    torn: bool = False

    @property
    def tensors(self) -> int:
        """Number of tensors, however many shards they have."""
        return len(stored_names(self.manifest.index)) if self.manifest else 0

    @property
    def nbytes(self) -> int:
        """Size of all files in the manifest, in bytes."""
        return sum(file.size for file in self.manifest.files.values()) if self.manifest else 0


@dataclass(frozen=True)
class TensorDifference:
    """Tensor that differs between two checkpoints.

    Attributes:
        kinds: dtype and shape in both checkpoints if they differ; else None.
        relative: norm of the difference over the norm of the first; infinite if that is zero, NaN
            if one of the tensors is not finite.
    """

    name: str
    kinds: tuple[str, str] | None
    relative: float


@dataclass(frozen=True)
class Comparison:
    """Result of comparing two checkpoints.

    Attributes:
        different: other tensors that both have, most different first.
        only_first, only_second: names that the other checkpoint lacks.
    """

    equal: int
    different: tuple[TensorDifference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]

    @property
    def same(self) -> bool:
        """True if both have the same tensors with equal values."""
        return not (self.different or self.only_first or self.only_second)


def inspect_checkpoints(location: str | os.PathLike[str]) -> Iterator[CheckpointReport]:
    """Verify every byte of a checkpoint, or of all checkpoints of a run. Changes nothing, so the
    run may be active. Raise a ``CheckpointError`` if there is no checkpoint, or the folder cannot
    be read.

    Yields:
        A report per checkpoint, oldest first.
    """
    folder = storage_folder(location)
    for checkpoint in _checkpoints(folder):
        if is_torn(checkpoint):
            problem = "a save that was never finished"
            yield CheckpointReport(checkpoint.place, None, problem, torn=True)
            continue
        try:
            yield CheckpointReport(checkpoint.place, verified_manifest(checkpoint))
        except CheckpointError as error:
            yield CheckpointReport(checkpoint.place, None, str(error))


def _checkpoints(folder: StorageFolder) -> list[StorageFolder]:
    try:
        if is_folder_name(folder.name) or MANIFEST in folder.names():
            return [folder]
        folders = step_folders(folder / CHECKPOINTS)
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror or error}") from None
    if not folders:
        raise CheckpointError(
            f"{folder} has no checkpoint; expected the folder of a run (run.storage_path), or one "
            f"of the folders in its {CHECKPOINTS}/"
        )
    return folders


def compare_checkpoints(
    first: str | os.PathLike[str], second: str | os.PathLike[str],
    looked_at: Callable[[int, int], None] = lambda done, of: None,
) -> Comparison:
    """Compare two checkpoints tensor by tensor, even if their layouts differ. Only one tensor of
    each is in memory at a time. Raise a ``CheckpointError`` if a checkpoint is not intact.

    Args:
        looked_at: called with the numbers of compared and of common tensors.
    """
    manifests = [verified_manifest(storage_folder(folder)) for folder in (first, second)]
    names = [stored_names(manifest.index) for manifest in manifests]
    stored = [
        StoredTensors(folder, manifest.index, manifest.shards)
        for folder, manifest in zip((first, second), manifests, strict=True)
    ]
    shared = sorted(names[0] & names[1])
    different = []
    for done, name in enumerate(shared):
        first_value, second_value = (tensors.read({name: None})[name] for tensors in stored)
        difference = _difference(name, first_value, second_value)
        if difference is not None:
            different.append(difference)
        looked_at(done + 1, len(shared))
    different.sort(key=lambda d: (d.kinds is None, -d.relative if d.relative == d.relative else 0))
    return Comparison(
        len(shared) - len(different), tuple(different), tuple(sorted(names[0] - names[1])),
        tuple(sorted(names[1] - names[0])),
    )


def _difference(name: str, first: torch.Tensor, second: torch.Tensor) -> TensorDifference | None:
    kinds = _kind(first), _kind(second)
    if kinds[0] != kinds[1]:
        return TensorDifference(name, kinds, math.inf)
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (first, second)]
    if torch.equal(*bits):
        return None
    norm = first.double().norm().item()
    difference = (first.double() - second.double()).norm().item()
    return TensorDifference(name, None, difference / norm if norm else math.inf)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def prune_checkpoints(
    location: str, keep: int, say: Callable[[str], None] = lambda line: None
) -> list[Path | str]:
    """Remove all but the newest intact checkpoints of an inactive run. Corrupt and torn checkpoints
    are kept.

    Args:
        keep: number of checkpoints to keep, at least 1.
        say: called with messages about the folder's owner and about files that are kept.

    Returns:
        The removed folders, oldest first.

    Raises:
        CheckpointError: there is no checkpoint.
        ConfigError: a run is active in the folder.
        RunFileError: a checkpoint cannot be removed.
    """
    _checkpoints(storage_folder(location))
    with RunFolder(location).owned(say) as check_owner:
        intact = [r.folder for r in inspect_checkpoints(location) if r.problem is None]
        removed = intact[:-keep]
        for folder in removed:
            check_owner()
            if (renamed := drop(storage_folder(folder))) is not None:
                say(f"{folder} had files that raymm did not write; they are now in {renamed}")
    return removed
