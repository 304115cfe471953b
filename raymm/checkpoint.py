"""Checkpoints: shards of all ranks, made valid by one atomic rename of a manifest.

``{storage}/checkpoints/step-00000100/`` holds safetensors and ``manifest.json``. Shards
are written first; the manifest is renamed into place last, so a folder without one is a
torn checkpoint and is never read. Tensors are named by module and parameter, not by
stage, and pieces by their ranges: a checkpoint can be read under another layout.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raymm.actors.group import RankFailedError
from raymm.actors.shards import ShardError, StoredTensors, copy_tensors
from raymm.execution import execution_of
from raymm.model import LANGUAGE_MODEL, MultimodalModule
from raymm.parallel_module import ParallelModule

CHECKPOINT_FORMAT = 1
MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read. Says which file and why."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: optimizer steps taken.
        index: file of every tensor.
        sizes: bytes of every file.
        plan: what it was written under, as of :func:`raymm.execution.execution_of`.
        trainer: the trainer's own state (position in the data).
    """

    step: int
    index: dict[str, str]
    sizes: dict[str, int]
    plan: dict[str, Any]
    trainer: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        storage: the run's folder.
        keep: how many checkpoints to keep.
    """

    def __init__(self, storage: str | os.PathLike[str], keep: int = 2) -> None:
        self._root = Path(storage).absolute() / "checkpoints"
        self._keep = keep

    def committed(self) -> list[Path]:
        """Folders of valid checkpoints, oldest first."""
        if not self._root.is_dir():
            return []
        return sorted(p.parent for p in self._root.glob(f"step-*/{MANIFEST}"))

    def latest(self) -> Path | None:
        """The newest valid checkpoint."""
        return next(reversed(self.committed()), None)

    def save(self, parallel: ParallelModule, trainer: dict[str, Any]) -> Path:
        """Write a checkpoint of the current state and drop old ones."""
        step = parallel.steps_taken
        folder = self._root / f"step-{step:08d}"
        if folder.exists():
            shutil.rmtree(folder)  # torn, or of the same step
        folder.mkdir(parents=True)
        written = parallel.group.call("save", str(folder), parallel.reloadable())
        index = {name: file for part in written for file, names in part.items() for name in names}
        sizes = {file: (folder / file).stat().st_size for part in written for file in part}
        plan = execution_of(parallel.plan).to_dict()
        manifest = Manifest(step, index, sizes, plan, trainer)
        _commit(folder / MANIFEST, {"format": CHECKPOINT_FORMAT, **asdict(manifest)})
        for old in self.committed()[: -self._keep]:
            (old / MANIFEST).unlink()  # first: a half-deleted checkpoint must not look valid
            shutil.rmtree(old)
        return folder


def _commit(path: Path, value: Any) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest.

    Raises:
        CheckpointError: if it is missing, of another format, or a file is missing or torn.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: not a checkpoint, or a torn one")
    try:
        data = json.loads(path.read_text())
        if data.pop("format") != CHECKPOINT_FORMAT:
            raise CheckpointError(f"{path}: format is not {CHECKPOINT_FORMAT}")
        manifest = Manifest(**data)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise _damaged(folder, f"{path} is damaged: {error}") from None
    for name, size in manifest.sizes.items():
        file = folder / name
        if "/" in name or not file.is_file() or file.stat().st_size != size:
            raise _damaged(folder, f"{file} is missing or not {size} bytes long")
    return manifest


def restore(parallel: ParallelModule, folder: Path) -> Manifest:
    """Load a checkpoint into running processes, of either style.

    Raises:
        CheckpointError: if it is damaged, lacks trainable parameters of the model, or has them
            in other shapes.
    """
    manifest = read_manifest(folder)
    try:
        missing = parallel.group.call("load", str(folder), manifest.index, manifest.step)
    except RankFailedError as error:
        reason = getattr(error.__cause__, "cause", None)
        if isinstance(reason, ShardError):
            raise CheckpointError(f"{folder}: {reason}") from None
        raise
    _check_complete(folder, {name for part in missing for name in part})
    parallel.restore_step(manifest.step)
    return manifest


def load_into_model(model: MultimodalModule, folder: Path) -> Manifest:
    """Load a checkpoint's weights into a model in this process (all of it is materialized).

    Raises:
        CheckpointError: as from :func:`restore`.
    """
    manifest = read_manifest(folder)
    model.materialize()
    parts = {name: model.encoders[name] for name in model.encoder_names}
    parts[LANGUAGE_MODEL] = model.language_model
    for name, part in parts.items():
        own = {f"{name}/{key}": t for key, t in part.state_dict(keep_vars=True).items()}
        try:
            stored = StoredTensors(folder, manifest.index).read(dict.fromkeys(own))
            copy_tensors(stored, own.items())
        except ShardError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        trainable = {f"{name}/{key}" for key, p in part.named_parameters() if p.requires_grad}
        _check_complete(folder, trainable - set(stored))
    return manifest


def _check_complete(folder: Path, lacking: set[str]) -> None:
    if lacking:
        raise CheckpointError(
            f"{folder} lacks {len(lacking)} trainable parameter(s) of this model: "
            f"{', '.join(sorted(lacking)[:5])}"
        )


def _damaged(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{reason}. Remove {folder} to go on from the checkpoint before it, or from the beginning"
    )
