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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raymm.actors.optimizer.checkpoint_shards import WrittenShard
from raymm.actors.storage.folder import StorageFolder
from raymm.actors.storage.location import storage_folder
from raymm.errors import CheckpointError, NotFiniteError, RunFileError
from raymm.files.run_files import writing
from raymm.runtime.parallel_module import ParallelModule
from raymm.runtime.skipped_step import MAX_NAMED
from raymm.scheduler.plan.plan import Plan
from raymm.storage.background_save import BackgroundSave, Saved
from raymm.storage.manifest import MANIFEST, FileEntry, Manifest, write_manifest
from raymm.storage.rank_calls import call_ranks, call_ranks_behind
from raymm.storage.step_folders import (
    CHECKPOINTS,
    TORN,
    drop,
    folder_name,
    has_manifest,
    is_torn,
    listed_names,
    partial_files,
    remove_torn,
    set_aside,
    step_folders,
    step_number,
    verified_manifest,
)


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
            *([f"the newest intact checkpoint is {self.folder}"] if self.corrupt else ()),
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
        unremoved: message about files of old checkpoints that stayed when the last save removed
            them; None if nothing stayed.
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
        self._behind: BackgroundSave | None = None
        self.run: dict[str, Any] = {}
        self.current: Path | str | None = None
        self._best: Callable[[Collection[int]], int | None] = lambda steps: None
        self.unremoved: str | None = None

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
                f"cannot read the checkpoint folder {self._root}: {error.strerror or error}"
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
                "no checkpoint is intact:\n" + "\n".join(corrupt) + "\nRestore the changed files; "
                f"or, to start from the beginning, remove {self._root} or set another storage_path"
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
            if listed_names(folder) is None:  # :meth:`newest` reports it
                continue
            with writing(folder):
                if is_torn(folder):
                    aside = remove_torn(folder)
                    kept = f"; other files in it are now in {aside}" if aside else ""
                    removed.append(f"{folder}, which was never committed{kept}")
                    continue
                for name in partial_files(folder):
                    folder.unlink(name)
                    removed.append(f"{folder / name}")
        return removed

    def keep_best(self, best: Callable[[Collection[int]], int | None]) -> None:
        """Keep one more checkpoint than the newest ones.

        Args:
            best: called now and after each commit, from the thread that commits, with the steps of
                the committed checkpoints; returns the step of the checkpoint to keep.
        """
        self._best = best
        best([step_number(folder.name) for folder in self._whole()])

    def save(self, parallel: ParallelModule, trainer: dict[str, Any]) -> Path | str:
        """Write a checkpoint of the current state and drop old ones. A state that was saved or
        loaded here already is not written again.

        Raises:
            RunFileError: it cannot be written; says the path and the cause. Earlier checkpoints
                are as they were.
            NotFiniteError: a parameter, or what the optimizer keeps of one, is not finite. Nothing
                is written or dropped then.
        """
        self.finish()
        folder = self._folder_of(parallel.steps_taken)
        if self._is_current(folder):
            return folder.place
        if names := parallel.not_finite_tensors():
            raise self._not_finite(parallel.steps_taken, names)
        self.check_owner()
        return self._put(parallel.steps_taken, parallel.plan, trainer, lambda: call_ranks(
            parallel.group, "save", folder.location, parallel.reloadable()
        ))

    def start(self, parallel: ParallelModule, trainer: dict[str, Any]) -> None:
        """:meth:`save`, but steps may go on once the state is copied to host memory, which is when
        this returns. Waits for the one before it, which :meth:`finish` returns first: at most one
        is under way.

        Raises:
            RunFileError, NotFiniteError: of the one before it.
            RankFailedError: a rank died.
        """
        self.finish()
        step, plan, group = parallel.steps_taken, parallel.plan, parallel.group
        folder = self._folder_of(step)
        if self._is_current(folder):
            return
        self.check_owner()
        group.call("copy_state", parallel.reloadable())

        def write() -> list[dict[str, WrittenShard]]:
            parts = call_ranks_behind(group, "write_copy", folder.location)
            if names := list(dict.fromkeys(name for part in parts for name in part.not_finite)):
                raise self._not_finite(step, names)
            return [part.shards for part in parts]

        self._behind = BackgroundSave(
            step, lambda check: self._put(step, plan, trainer, write, check)
        )

    @property
    def under_way(self) -> int | None:
        """Of which step a checkpoint is being written; None if there is none, or it has ended."""
        return None if self._behind is None or self._behind.ended else self._behind.step

    def wait(self, seconds: float) -> bool:
        """Wait for what was started, at most so long; whether nothing is under way.

        Args:
            seconds: how long.
        """
        return self._behind is None or self._behind.wait(seconds)

    def ended(self) -> Saved | None:
        """What was started, if it is committed by now, once; does not wait.

        Raises:
            RunFileError, NotFiniteError: it could not be saved, as of :meth:`save`.
            RankFailedError: a rank died meanwhile.
        """
        return None if self.under_way is not None else self.finish()

    def finish(self) -> Saved | None:
        """Wait for what was started; None if there is none. Raises as :meth:`ended`."""
        if self._behind is None:
            return None
        try:
            saved = self._behind.result()
        except Exception:  # no KeyboardInterrupt: then it is still under way
            self._behind = None
            raise
        self._behind = None
        return saved

    def abandon(self) -> None:
        """What was started is not to be committed any more; what it has left is removed at the next
        start."""
        if self._behind is not None:
            self._behind.abandon()
            self._behind = None

    def _folder_of(self, step: int) -> StorageFolder:
        return self._root / folder_name(step)

    def _is_current(self, folder: StorageFolder) -> bool:
        with writing(folder):
            return folder.place == self.current and MANIFEST in folder.names()

    def _put(
        self, step: int, plan: Plan, trainer: dict[str, Any],
        write: Callable[[], list[dict[str, WrittenShard]]],
        check: Callable[[], None] = lambda: None,
    ) -> Path | str:
        """Have the shards written, and commit them.

        Args:
            step, plan, trainer: of the state.
            write: has all ranks write theirs; returns what is in them.
            check: raises if the checkpoint is not to be made valid any more.
        """
        folder = self._folder_of(step)
        try:
            self._make_room(folder)
            with writing(folder):
                folder.create()
                folder.replace(TORN, b"")
            shards = write()
            self._before_commit()
            self.check_owner()
            check()
            write_manifest(folder.place, self._manifest(step, plan, trainer, shards))
            with writing(folder):
                folder.unlink(TORN)
        except (RunFileError, CheckpointError) as error:
            stays = self._what_stays(folder)
            raise RunFileError(
                f"the checkpoint of step {step} could not be saved: {error}; {stays}"
            ) from None
        except NotFiniteError:
            self._what_stays(folder)
            raise
        self.current = folder.place
        self.unremoved = None
        try:
            self._remove_old(step)
        except RunFileError as error:
            self.unremoved = (
                f"an old checkpoint could not be removed: {error}. The next save tries again"
            )
        return folder.place

    def _what_stays(self, failed: StorageFolder) -> str:
        """After a save that failed; removes what it has written, which may be what fills the disk.
        """
        with suppress(OSError):
            remove_torn(failed)
        try:
            before = [folder for folder in self._committed() if folder not in self._corrupt]
        except OSError:
            return "earlier checkpoints are kept"
        return f"{before[-1]} is kept" if before else "there is no earlier checkpoint"

    def _not_finite(self, step: int, names: list[str]) -> NotFiniteError:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return NotFiniteError(
            f"no checkpoint of step {step} was written: these tensors are not finite: "
            f"{', '.join(names[:MAX_NAMED])}{more}. The last checkpoint is "
            f"{self.latest() or 'none'}. A lower optimizer.lr, or optimizer.max_grad_norm, may "
            "help"
        )

    def _make_room(self, folder: StorageFolder) -> None:
        """Remove a torn checkpoint that is in the way; set another one aside."""
        with writing(folder):
            if folder.name not in self._root.names():
                return
            if is_torn(folder):
                remove_torn(folder)
                return
            set_aside(folder)
            self._corrupt.discard(folder)

    def _manifest(
        self, step: int, plan: Plan, trainer: dict[str, Any],
        shards: Sequence[Mapping[str, WrittenShard]],
    ) -> Manifest:
        written = {file: shard for part in shards for file, shard in part.items()}
        return Manifest(
            step=step,
            index={name: file for file, shard in written.items() for name in shard.names},
            files={
                file: FileEntry(size=shard.file.size, xxh3_128=shard.file.checksum)
                for file, shard in written.items()
            },
            plan=plan.to_dict(),
            run=self.run,
            trainer=trainer,
        )

    def _remove_old(self, step: int) -> None:
        """Of the checkpoints up to the one that was just saved, keep the newest. Corrupt ones,
        which all later ones are, neither count nor go."""
        counted = self._whole()
        upto = counted.index(self._root / folder_name(step)) + 1
        best = self._best([step_number(folder.name) for folder in counted[:upto]])
        for old in counted[:upto][: -self._keep]:
            if step_number(old.name) == best:
                continue
            try:
                aside = drop(old)
            except CheckpointError:
                self._corrupt.add(old)
                continue
            if aside is not None:
                self.unremoved = (
                    f"{old} had files that raymm did not write; they are now in {aside}"
                )

    def _whole(self) -> list[StorageFolder]:
        """Return committed checkpoints that are not known to be corrupt, oldest first."""
        with writing(self._root):
            return [
                folder for folder in step_folders(self._root)
                if folder not in self._corrupt and has_manifest(folder)
            ]
