"""Checkpoints: shards of all ranks, made valid by a manifest that comes last, in one step.

``{storage}/checkpoints/step-00000100/`` holds safetensors and ``manifest.json``, in a folder or in
a bucket. Shards are written first, beside a mark that says so; the manifest is put in place last.
A folder with the mark and without a manifest is a torn checkpoint: it is never read, and removed
at the next start. A manifest has a checksum of every shard and of itself, which every reader
compares first. Tensors are named by module and parameter, not by stage, and shards by their ranges:
a checkpoint can be read under another layout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raymm.actors.optimizer.checkpoint_shards import (
    ShardError,
    copy_tensors,
    stored_names,
)
from raymm.actors.optimizer.stored_tensors import StoredTensors
from raymm.actors.storage.folder import PARTIAL, StorageFolder
from raymm.actors.storage.location import storage_folder
from raymm.errors import RankFailedError
from raymm.files.run_files import RunFileError, writing
from raymm.layout.plan_data import plan_to_dict
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.parallel_module import ParallelModule
from raymm.runtime.skipped_step import MAX_NAMED, NotFiniteError
from raymm.storage.manifest import (
    MANIFEST,
    CheckpointError,
    FileEntry,
    Manifest,
    read_manifest,
    write_manifest,
)
from raymm.storage.step_folders import (
    CHECKPOINTS,
    TORN,
    drop,
    folder_name,
    is_torn,
    step_folders,
    verified_manifest,
)

# Parameters that an error names.
NAMES_SHOWN = 5


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte is what was written.

    Attributes:
        folder: where it is: its path or, in a bucket, its URL.
        manifest: what it consists of.
        corrupt: what is wrong with the newer ones, newest first.
    """

    folder: Path | str
    manifest: Manifest
    corrupt: tuple[str, ...] = ()

    def warnings(self) -> list[str]:
        """What to say aloud of the newer ones."""
        return [
            *(f"corrupt checkpoint, left where it is: {reason}" for reason in self.corrupt),
            *([f"the newest whole one before it is {self.folder}"] if self.corrupt else ()),
        ]


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        storage: the run's folder, or its URL.
        keep: how many checkpoints to keep.
        check_owner: called before anything is changed and before a checkpoint is made valid;
            raises if the folder is not this run's. For whoever writes anything else there, too.
        before_commit: called before a checkpoint is made valid, once its shards are written: for
            what is to be there by then.

    Attributes:
        run: what checkpoints say of the run (:class:`Manifest`).
        current: the checkpoint that was saved or found last.
    """

    def __init__(
        self,
        storage: str | os.PathLike[str],
        keep: int = 2,
        check_owner: Callable[[], None] = lambda: None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._root = storage_folder(storage) / CHECKPOINTS
        self._keep = keep
        self.check_owner = check_owner
        self._before_commit = before_commit
        self._corrupt: set[StorageFolder] = set()
        self.run: dict[str, Any] = {}
        self.current: Path | str | None = None

    def committed(self) -> list[Path | str]:
        """Checkpoints that are not torn, oldest first. Nothing in them is verified.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        with self._reading():
            return [folder.place for folder in self._committed()]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot read {self._root}, where checkpoints are: {error.strerror or error}"
            ) from None

    def _committed(self) -> list[StorageFolder]:
        return [folder for folder in step_folders(self._root) if not is_torn(folder)]

    def latest(self) -> Path | str | None:
        """The newest of :meth:`committed`: to look at, not to load (:meth:`newest`)."""
        return next(reversed(self.committed()), None)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole: every byte was compared with its checksum. None if
        there is no checkpoint. Corrupt ones stay where they are.

        Raises:
            CheckpointError: there are checkpoints, and all are corrupt; says what is wrong with
                each.
        """
        corrupt = []
        with self._reading():
            committed = self._committed()
        for folder in reversed(committed):
            try:
                manifest = verified_manifest(folder)
            except CheckpointError as error:
                corrupt.append(str(error))
                self._corrupt.add(folder)
                continue
            self.current = folder.place
            return Checkpoint(folder.place, manifest, tuple(corrupt))
        if corrupt:
            raise CheckpointError(
                "no checkpoint is whole:\n" + "\n".join(corrupt) + "\nPut back what was changed; "
                f"or, to begin from the beginning, remove {self._root} or give another storage_path"
            )
        return None

    def remove_leftovers(self) -> list[str]:
        """Remove what saves that were never committed have left; returns what it was. Only for
        the run that owns the folder.

        Raises:
            RunFileError: it cannot be removed.
        """
        removed = []
        with writing(self._root):
            folders = step_folders(self._root)
        for folder in folders:
            with writing(folder):
                if is_torn(folder):
                    folder.remove()
                    removed.append(f"{folder}, which was never committed")
                    continue
                for name in folder.files():
                    if name.startswith(".") and name.endswith(PARTIAL):
                        folder.unlink(name)
                        removed.append(f"{folder / name}")
        return removed

    def save(self, parallel: ParallelModule, trainer: dict[str, Any]) -> Path | str:
        """Write a checkpoint of the current state and drop old ones. A state that was saved or
        loaded here already is not written again.

        Raises:
            RunFileError: it cannot be written; says the path and the cause. Earlier checkpoints
                are as they were.
            NotFiniteError: a parameter, or what the optimizer keeps of one, is not finite. Nothing
                is written or dropped then.
        """
        step = parallel.steps_taken
        folder = self._root / folder_name(step)
        with writing(folder):
            if folder.place == self.current and MANIFEST in folder.names():
                return folder.place
        self._check_finite(parallel)
        self.check_owner()
        try:
            self._make_room(folder)
            with writing(folder):
                folder.create()
                folder.replace(TORN, b"")
            self._write(parallel, folder, trainer)
            with writing(folder):
                folder.unlink(TORN)
        except (RunFileError, ShardError) as error:
            stays = self._what_stays(folder)
            raise RunFileError(
                f"the checkpoint of step {step} could not be saved: {error}; {stays}"
            ) from None
        self.current = folder.place
        self._remove_old(step)
        return folder.place

    def _what_stays(self, failed: StorageFolder) -> str:
        """After a save that failed; removes what it has written, which may be what fills the disk.
        """
        with suppress(OSError):
            failed.remove()
        try:
            before = [folder for folder in self._committed() if folder not in self._corrupt]
        except OSError:
            return "those before it stay"
        return f"{before[-1]} stays" if before else "there is none before it"

    def _check_finite(self, parallel: ParallelModule) -> None:
        if names := parallel.not_finite_tensors():
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            raise NotFiniteError(
                f"no checkpoint of step {parallel.steps_taken} was written: not finite are "
                f"{', '.join(names[:MAX_NAMED])}{more}. The last checkpoint is "
                f"{self.latest() or 'none'}. A lower optimizer.lr, or optimizer.max_grad_norm, may "
                "help"
            )

    def _make_room(self, folder: StorageFolder) -> None:
        """Remove a torn checkpoint that is in the way; set another one aside."""
        with writing(folder):
            names = self._root.names()
            if folder.name not in names:
                return
            if is_torn(folder):
                folder.remove()
                return
            number, aside = 1, f"set-aside-{folder.name}"
            while aside in names:
                number += 1
                aside = f"set-aside-{folder.name}-{number}"
            folder.rename(aside)
            self._corrupt.discard(folder)

    def _write(
        self, parallel: ParallelModule, folder: StorageFolder, trainer: dict[str, Any]
    ) -> None:
        try:
            shards = parallel.group.call("save", folder.location, parallel.reloadable())
        except RankFailedError as error:
            if (reason := _shard_error(error)) is not None:
                raise reason from None
            raise
        written = {file: shard for part in shards for file, shard in part.items()}
        manifest = Manifest(
            step=parallel.steps_taken,
            index={name: file for file, shard in written.items() for name in shard.names},
            files={
                file: FileEntry(size=shard.file.size, xxh3_128=shard.file.checksum)
                for file, shard in written.items()
            },
            plan=plan_to_dict(parallel.plan),
            run=self.run,
            trainer=trainer,
        )
        self._before_commit()
        self.check_owner()
        write_manifest(folder.place, manifest)

    def _remove_old(self, step: int) -> None:
        """Of the checkpoints up to the one that was just saved, keep the newest. Later ones are
        corrupt: they neither count nor go."""
        with writing(self._root):
            counted = [folder for folder in self._committed() if folder not in self._corrupt]
        upto = counted.index(self._root / folder_name(step)) + 1
        for old in counted[:upto][: -self._keep]:
            drop(old)


def _shard_error(error: RankFailedError) -> ShardError | None:
    """What a rank said of a shard, if that is why it failed."""
    reason = getattr(error.__cause__, "cause", None)
    return reason if isinstance(reason, ShardError) else None


def restore(parallel: ParallelModule, folder: Path | str) -> Manifest:
    """Load a checkpoint into running processes, of either style. Each process verifies the files
    that it reads from.

    Raises:
        CheckpointError: if it is damaged, lacks trainable parameters of the model, has something
            that the model lacks or does not train any more, has other shapes or dtypes, or if
            some are not finite.
    """
    manifest = read_manifest(folder)
    try:
        loaded = parallel.group.call(
            "load", str(folder), manifest.index, manifest.shards, manifest.step
        )
    except RankFailedError as error:
        if (reason := _shard_error(error)) is not None:
            raise CheckpointError(f"{folder}: {reason}") from None
        raise
    _check_both_ways(
        folder, {name for part in loaded for name in part.lacking},
        stored_names(manifest.index) - {name for part in loaded for name in part.taken},
    )
    if names := parallel.not_finite_tensors():
        raise CheckpointError(
            f"{folder} has tensors that are not finite: {', '.join(names[:MAX_NAMED])}"
        )
    parallel.restore_step(manifest.step)
    return manifest


def load_into_model(model: MultimodalModule, folder: Path | str) -> Manifest:
    """Load a checkpoint's weights into a model in this process (all of it is materialized).

    Raises:
        CheckpointError: as from :func:`restore`.
    """
    manifest = read_manifest(folder)
    model.materialize()
    parts = {name: model.encoders[name] for name in model.encoder_names}
    parts[LANGUAGE_MODEL] = model.language_model
    stored = StoredTensors(folder, manifest.index, manifest.shards)
    left = {name for name in stored_names(manifest.index) if not name.startswith("optimizer/")}
    lacking: set[str] = set()
    for name, part in parts.items():
        own = {f"{name}/{key}": t for key, t in part.state_dict(keep_vars=True).items()}
        try:
            tensors = stored.read(dict.fromkeys(own))
            copy_tensors(tensors, own.items())
        except ShardError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        trainable = {f"{name}/{key}" for key, p in part.named_parameters() if p.requires_grad}
        lacking |= trainable - set(tensors)
        left -= set(tensors)
    _check_both_ways(folder, lacking, left)
    return manifest


def _check_both_ways(folder: Path | str, lacking: set[str], left: set[str]) -> None:
    """
    Args:
        lacking: trainable parameters of the model that the checkpoint lacks.
        left: what the checkpoint has, and no part of the model has taken.
    """
    if lacking:
        raise CheckpointError(
            f"{folder} lacks {len(lacking)} trainable parameter(s) of this model: {_few(lacking)}"
        )
    if left:
        state = {name for name in left if name.startswith("optimizer/")}
        lost = left - state or state
        what = "tensor(s) that this model lacks"
        if lost == state:
            what = "tensor(s) of an optimizer of parameters that this model does not train"
        raise CheckpointError(
            f"{folder} has {len(lost)} {what}, which would be lost: {_few(lost)}"
        )


def _few(names: set[str]) -> str:
    return ", ".join(sorted(names)[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
