"""The folders of a run's checkpoints, by their steps."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

from raymm.actors.optimizer.checkpoint_shards import SHARD_FILE
from raymm.actors.storage.folder import PARTIAL, StorageFolder
from raymm.errors import CheckpointError
from raymm.files.run_files import writing
from raymm.storage.manifest import MANIFEST, Manifest, read_manifest, verify_checkpoint

CHECKPOINTS = "checkpoints"
"""The folder in a run's that they are in."""
_NAME = re.compile(r"step-(\d{8,})")
TORN = f".not-committed{PARTIAL}"
"""In folders that are no checkpoint yet, or no more."""


def folder_name(step: int) -> str:
    """Of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_number(name: str) -> int:
    """Return the step of a folder that :func:`folder_name` has named."""
    return int(name.removeprefix("step-"))


def is_folder_name(name: str) -> bool:
    """Whether a folder of this name is, or was to be, a checkpoint."""
    return _NAME.fullmatch(name) is not None


def step_folders(root: StorageFolder) -> list[StorageFolder]:
    """Those of a run, torn ones too, oldest first.

    Args:
        root: the folder that they are in.
    """
    matches = ((name, _NAME.fullmatch(name)) for name in root.names())
    steps = {name: int(match[1]) for name, match in matches if match}
    return [root / name for name in sorted(steps, key=steps.__getitem__)]


def listed_names(folder: StorageFolder) -> list[str] | None:
    """Return the names in a folder; None if they cannot be read: permissions, a failing disk, a
    link in a circle."""
    try:
        return folder.names()
    except OSError:
        return None


def is_torn(folder: StorageFolder) -> bool:
    """Return True for what a save that was never committed has left. A folder that has lost its
    manifest otherwise, or that cannot be listed, is a damaged checkpoint."""
    names = listed_names(folder)
    if names is None:
        return False
    marked = TORN in names or all(n.startswith(".") and n.endswith(PARTIAL) for n in names)
    return MANIFEST not in names and marked


def has_manifest(folder: StorageFolder) -> bool:
    """Return True if a step's folder can be listed and has a manifest, whatever is in it."""
    return MANIFEST in (listed_names(folder) or ())


def partial_files(folder: StorageFolder) -> list[str]:
    """Names of the files of a step's folder that were never whole; none if the folder is a link."""
    names = [] if folder.is_link else folder.names()
    return [name for name in names if name.startswith(".") and name.endswith(PARTIAL)]


def remove_torn(folder: StorageFolder) -> StorageFolder | None:
    """Remove a torn checkpoint: the files that saves write, the mark last. Links are removed, and
    never what they lead to.

    Returns:
        The folder under its new name, if other files are in it: it is set aside with these.

    Raises:
        OSError: something cannot be removed.
    """
    if not folder.is_link:
        _unlink(folder, [name for name in folder.names() if SHARD_FILE.fullmatch(name)])
    return _remove_emptied(folder)


def drop(folder: StorageFolder) -> StorageFolder | None:
    """Remove a checkpoint and the files that its manifest names: a half-deleted one must not look
    valid, nor damaged. Links are removed, and never what they lead to.

    Returns:
        The folder under its new name, if other files are in it: it is set aside with these.

    Raises:
        CheckpointError: its manifest cannot be read.
        RunFileError: it cannot be made invalid; it is as it was, then.
    """
    if folder.is_link:
        with writing(folder):
            folder.remove()
        return None
    shards = read_manifest(folder.place).files
    with writing(folder):
        folder.replace(TORN, b"")
        folder.unlink(MANIFEST)
    with suppress(OSError):  # what stays is removed at the next start
        _unlink(folder, shards)
        return _remove_emptied(folder)
    return None


def _unlink(folder: StorageFolder, names: Iterable[str]) -> None:
    for name in names:
        with suppress(IsADirectoryError):  # no save has made it
            folder.unlink(name)


def _remove_emptied(folder: StorageFolder) -> StorageFolder | None:
    """Remove a folder whose shards are gone, or set it aside if anything else is in it."""
    aside = None
    if not folder.is_link:
        _unlink(folder, [name for name in partial_files(folder) if name != TORN])
        if set(folder.names()) - {TORN}:
            folder = aside = set_aside(folder)
        folder.unlink(TORN)
    if aside is None:
        folder.remove()
    return aside


def set_aside(folder: StorageFolder) -> StorageFolder:
    """Rename a step's folder, so that it is no checkpoint any more; returns it under its new name.

    Raises:
        OSError: it cannot be renamed.
    """
    names = folder.parent.names()
    number, aside = 1, f"set-aside-{folder.name}"
    while aside in names:
        number += 1
        aside = f"set-aside-{folder.name}-{number}"
    return folder.rename(aside)


def verified_manifest(folder: StorageFolder) -> Manifest:
    """The manifest of a checkpoint whose every byte is what was written.

    Raises:
        CheckpointError: it is not; says which file, and why.
    """
    manifest = read_manifest(folder.place)
    if folder.name != folder_name(manifest.step):
        raise CheckpointError(
            f"{folder} was renamed or copied: its {MANIFEST} is of step {manifest.step}"
        )
    verify_checkpoint(folder.place, manifest)
    return manifest
