"""Checkpoints: shards of all ranks, committed by an atomic write of a manifest.

``{storage}/checkpoints/step-00000100/`` holds safetensors and ``manifest.json``, in a folder or a
bucket. Shards are written first, next to a mark of an uncommitted checkpoint; the manifest comes
last. A folder with the mark and without a manifest is a torn checkpoint. It is never read, and
removed at the next start. A manifest has checksums of all shards and of itself, which every reader
verifies first. Tensors are named by module and parameter, not by stage, and shards by their ranges,
so a checkpoint can be read under another layout.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from raymm.actors.faults.diagnosis import first_line
from raymm.actors.optimizer.checkpoint_shards import WrittenShard
from raymm.actors.recovery.observed_ranks import LISTEN_S
from raymm.actors.storage.folder import StorageFolder
from raymm.actors.storage.location import storage_folder
from raymm.errors import (
    CheckpointError,
    InternalError,
    NotFiniteError,
    RankFailedError,
    RunFileError,
)
from raymm.files.run_files import writing
from raymm.runtime.parallel_module import ParallelModule
from raymm.runtime.skipped_step import MAX_NAMED
from raymm.scheduler.plan.plan import Plan
from raymm.storage.manifest import MANIFEST, FileEntry, Manifest, write_manifest
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

# Seconds that an abandoned save may take to end.
GIVE_UP_S = 5.0


class Saved(NamedTuple):
    """Committed checkpoint.

    Attributes:
        seconds: from the copy of the state until the commit.
    """

    step: int
    folder: Path | str
    seconds: float


class BackgroundSave:
    """Thread that writes one checkpoint.

    Args:
        work: writes and commits the checkpoint and returns its location. Receives a function to
            call before irreversible actions; it raises once the save was abandoned.
    """

    def __init__(self, step: int, work: Callable[[Callable[[], None]], Path | str]) -> None:
        self.step = step
        self._work = work
        self._began = time.perf_counter()
        self._saved: Saved | None = None
        self._error: Exception | None = None
        self._abandoned = threading.Event()
        # A driver that ends with an error must not wait for a hanging file system.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """True if :meth:`result` returns immediately."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Wait for at most some seconds. Return True if the save has ended."""
        self._thread.join(seconds)
        return self.ended

    def result(self) -> Saved:
        """Wait for the save. Raises what the save raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    def abandon(self) -> None:
        """Prevent the commit, unless it is in progress."""
        self._abandoned.set()
        self._thread.join(GIVE_UP_S)

    def _run(self) -> None:
        try:
            folder = self._work(self._check)
        except Exception as error:  # raised again by result()
            self._error = error
            return
        self._saved = Saved(self.step, folder, time.perf_counter() - self._began)

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise InternalError(f"the checkpoint of step {self.step} was abandoned")


def call_ranks(group: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of all ranks with the same arguments. Return the results by rank. Raise a
    ``CheckpointError`` if a rank failed with this error about a shard, and a ``RankFailedError`` if
    a rank died or raised another error."""
    try:
        return group.call(method, *args)
    except RankFailedError as error:
        reason = getattr(error.__cause__, "cause", None)
        if isinstance(reason, CheckpointError):
            raise reason from None
        raise


def call_ranks_behind(group: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of all ranks from a background thread while steps continue.

    The method must run in a separate thread of each rank. The main thread must watch the ranks,
    because this call neither checks them actively nor ends them. It waits for as long as they live.

    Raises:
        CheckpointError: a rank failed with this error about a shard, after all have finished; or a
            rank has no memory for its shard.
        RankFailedError: a rank died or raised another error, or all have ended.
    """
    try:
        refs = pending = group.start(method, *args)
        while pending:
            group.check_running()
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=LISTEN_S)
        return [_of_rank(rank, ref) for rank, ref in enumerate(refs)]
    except RayTaskError as error:
        if isinstance(error.cause, CheckpointError):
            raise error.cause from None
        raise RankFailedError(str(error)) from error
    except CheckpointError:  # a rank had no memory for its shard
        raise
    except (RayError, RuntimeError) as error:
        raise RankFailedError(first_line(error)) from error


def _of_rank(rank: int, ref: ray.ObjectRef) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, MemoryError):
            raise CheckpointError(f"rank {rank} has no memory to write its shard") from None
        raise


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint whose every byte was verified.

    Attributes:
        corrupt: problems of newer checkpoints, newest first.
    """

    folder: Path | str
    manifest: Manifest
    corrupt: tuple[str, ...] = ()

    def warnings(self) -> list[str]:
        """Return messages about corrupt newer checkpoints."""
        return [
            *(f"corrupt checkpoint, left where it is: {reason}" for reason in self.corrupt),
            *([f"the newest intact checkpoint is {self.folder}"] if self.corrupt else ()),
        ]


class _State(NamedTuple):
    """State of the driver when a save starts; see :class:`raymm.storage.manifest.Manifest`."""

    step: int
    plan: Plan
    trainer: dict[str, Any]
    kernels: dict[str, str]


class CheckpointStore:
    """Checkpoints of one run.

    Args:
        check_owner: called before each change and before each commit; raises if the folder belongs
            to another run. Other writers to the folder also call it.
        before_commit: called before each commit, once the shards are written, to complete files
            that must exist by then.

    Attributes:
        run: description of the run for the manifest (:class:`Manifest`).
        unremoved: message about files of old checkpoints that the last save could not remove, or
            None.
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

    def describe(self, run: dict[str, Any]) -> None:
        """Set the description of the run for the manifests of the following checkpoints."""
        self.run = run

    def committed(self) -> list[Path | str]:
        """Return all checkpoints that are not torn, oldest first. Their content is not verified.
        Raise a ``CheckpointError`` if the folder cannot be read."""
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
        """Return the newest of :meth:`committed`, for display. Use :meth:`newest` to load one."""
        return next(reversed(self.committed()), None)

    def newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint after verifying every byte; None if there is no
        checkpoint. Corrupt checkpoints are kept. Raise a ``CheckpointError`` if all checkpoints are
        corrupt. Names the problem of each."""
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
        """Remove the files of uncommitted saves; return their names. Only the owner of the folder
        may call it. Raise a ``RunFileError`` if a file cannot be removed."""
        removed = []
        with writing(self._root):
            folders = step_folders(self._root)
        for folder in folders:
            if listed_names(folder) is None:  # newest() reports it
                continue
            with writing(folder):
                if is_torn(folder):
                    renamed = remove_torn(folder)
                    note = f"; other files in it are now in {renamed}" if renamed else ""
                    removed.append(f"{folder}, which was never committed{note}")
                    continue
                for name in partial_files(folder):
                    folder.unlink(name)
                    removed.append(f"{folder / name}")
        return removed

    def keep_best(self, best: Callable[[Collection[int]], int | None]) -> None:
        """Keep one checkpoint in addition to the newest ones.

        Args:
            best: returns the step of the checkpoint to keep. Called now and after each commit, from
                the committing thread, with the steps of all committed checkpoints.
        """
        self._best = best
        best([step_number(folder.name) for folder in self._whole()])

    def save(self, parallel: ParallelModule, trainer: dict[str, Any]) -> Path | str:
        """Write and commit a checkpoint of the current state, and drop old ones. A state that was
        saved or loaded before is not written again. Raise a ``RunFileError`` if the checkpoint
        cannot be written. Names path and cause; earlier checkpoints are unchanged. Raise a
        ``NotFiniteError`` if a parameter or its optimizer state is not finite. Nothing is written
        or dropped."""
        self.finish()
        folder = self._folder_of(parallel.steps_taken)
        if self._is_current(folder):
            return folder.place
        if names := parallel.not_finite_tensors():
            raise self._not_finite(parallel.steps_taken, names)
        self.check_owner()
        state = _State(parallel.steps_taken, parallel.plan, trainer, dict(parallel.kernels))
        return self._put(state, lambda: call_ranks(
            parallel.group, "save", folder.location, parallel.reloadable()
        ))

    def start(self, parallel: ParallelModule, trainer: dict[str, Any]) -> None:
        """Start :meth:`save` in the background. Return once the state is copied to host memory;
        steps may then continue. At most one save is in flight: this waits for the previous one.
        Raise a ``RunFileError`` or ``NotFiniteError`` if the previous save failed, and a
        ``RankFailedError`` if a rank died."""
        self.finish()
        step, group = parallel.steps_taken, parallel.group
        state = _State(step, parallel.plan, trainer, dict(parallel.kernels))
        folder = self._folder_of(step)
        if self._is_current(folder):
            return
        self.check_owner()
        group.call("copy_state", parallel.reloadable())

        def write() -> list[dict[str, WrittenShard]]:
            copies = call_ranks_behind(group, "write_copy", folder.location)
            if names := list(dict.fromkeys(name for copy in copies for name in copy.not_finite)):
                raise self._not_finite(step, names)
            return [copy.shards for copy in copies]

        self._behind = BackgroundSave(
            step, lambda check: self._put(state, write, check)
        )

    @property
    def under_way(self) -> int | None:
        """Step of the save in flight; None if there is none."""
        return None if self._behind is None or self._behind.ended else self._behind.step

    def wait(self, seconds: float) -> bool:
        """Wait up to some seconds for the save in flight. Return True if none is in flight."""
        return self._behind is None or self._behind.wait(seconds)

    def ended(self) -> Saved | None:
        """Return a save that was committed since the last call, once; None otherwise. Does not
        wait. Raise a ``RunFileError`` or ``NotFiniteError`` if the save failed, as in :meth:`save`,
        and a ``RankFailedError`` if a rank died."""
        return None if self.under_way is not None else self.finish()

    def finish(self) -> Saved | None:
        """Wait for the save in flight; None if there is none. Raises as :meth:`ended`."""
        if self._behind is None:
            return None
        try:
            saved = self._behind.result()
        except Exception:  # not KeyboardInterrupt: the save is still in flight then
            self._behind = None
            raise
        self._behind = None
        return saved

    def abandon(self) -> None:
        """Prevent the commit of the save in flight. Its files are removed at the next start."""
        if self._behind is not None:
            self._behind.abandon()
            self._behind = None

    def _folder_of(self, step: int) -> StorageFolder:
        return self._root / folder_name(step)

    def _is_current(self, folder: StorageFolder) -> bool:
        with writing(folder):
            return folder.place == self.current and MANIFEST in folder.names()

    def _put(
        self, state: _State,
        write: Callable[[], list[dict[str, WrittenShard]]],
        check: Callable[[], None] = lambda: None,
    ) -> Path | str:
        """Write and commit a checkpoint. ``check`` raises if it must not be committed any more."""
        step = state.step
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
            write_manifest(folder.place, self._manifest(state, shards))
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
        """Remove the files of a failed save, and return a phrase about what is kept."""
        with suppress(OSError):
            remove_torn(failed)
        try:
            intact = [folder for folder in self._committed() if folder not in self._corrupt]
        except OSError:
            return "earlier checkpoints are kept"
        return f"{intact[-1]} is kept" if intact else "there is no earlier checkpoint"

    def _not_finite(self, step: int, names: list[str]) -> NotFiniteError:
        suffix = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return NotFiniteError(
            f"no checkpoint of step {step} was written: these tensors are not finite: "
            f"{', '.join(names[:MAX_NAMED])}{suffix}. The last checkpoint is "
            f"{self.latest() or 'none'}. A lower optimizer.lr, or optimizer.max_grad_norm, may "
            "help"
        )

    def _make_room(self, folder: StorageFolder) -> None:
        """Remove a torn checkpoint in the folder's place; rename any other one."""
        with writing(folder):
            if folder.name not in self._root.names():
                return
            if is_torn(folder):
                remove_torn(folder)
                return
            set_aside(folder)
            self._corrupt.discard(folder)

    def _manifest(
        self, state: _State, shards: Sequence[Mapping[str, WrittenShard]]
    ) -> Manifest:
        written = {file: shard for rank_shards in shards for file, shard in rank_shards.items()}
        return Manifest(
            step=state.step,
            index={name: file for file, shard in written.items() for name in shard.names},
            files={
                file: FileEntry(size=shard.file.size, xxh3_128=shard.file.checksum)
                for file, shard in written.items()
            },
            plan=state.plan.to_dict(),
            run=self.run,
            trainer=state.trainer,
            kernels=state.kernels,
        )

    def _remove_old(self, step: int) -> None:
        """Drop old checkpoints up to the saved step. Corrupt ones, like all later ones, are
        ignored."""
        counted = self._whole()
        upto = counted.index(self._root / folder_name(step)) + 1
        best = self._best([step_number(folder.name) for folder in counted[:upto]])
        for old in counted[:upto][: -self._keep]:
            if step_number(old.name) == best:
                continue
            try:
                renamed = drop(old)
            except CheckpointError:
                self._corrupt.add(old)
                continue
            if renamed is not None:
                self.unremoved = (
                    f"{old} had files that raymm did not write; they are now in {renamed}"
                )

    def _whole(self) -> list[StorageFolder]:
        """Return committed checkpoints that are not known to be corrupt, oldest first."""
        with writing(self._root):
            return [
                folder for folder in step_folders(self._root)
                if folder not in self._corrupt and has_manifest(folder)
            ]
