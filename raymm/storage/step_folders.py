"""Checkpoint folders of a run, by step."""

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
"""Name of the folder of all checkpoints in the run's folder."""
_NAME = re.compile(r"step-(\d{8,})")
TORN = f".not-committed{PARTIAL}"
"""Mark in folders that are not, or not any more, a checkpoint."""


def folder_name(step: int) -> str:
    """Return the name of the folder for a step's checkpoint."""
    return f"step-{step:08d}"


def step_number(name: str) -> int:
    """Return the step of a folder named by :func:`folder_name`."""
    return int(name.removeprefix("step-"))


def is_folder_name(name: str) -> bool:
    """Return True if a folder with this name is, or was to become, a checkpoint."""
    return _NAME.fullmatch(name) is not None


def step_folders(root: StorageFolder) -> list[StorageFolder]:
    """Return the checkpoint folders in ``root``, including torn ones, oldest first."""
    matches = ((name, _NAME.fullmatch(name)) for name in root.names())
    steps = {name: int(match[1]) for name, match in matches if match}
    return [root / name for name in sorted(steps, key=steps.__getitem__)]


def listed_names(folder: StorageFolder) -> list[str] | None:
    """Return the names in a folder; None if it cannot be read (permissions, failing disk, circular
    link)."""
    try:
        return folder.names()
    except OSError:
        return None


def is_torn(folder: StorageFolder) -> bool:
    """Return True for the remains of an uncommitted save. A folder that lost its manifest
    otherwise, or that cannot be listed, is a damaged checkpoint."""
    names = listed_names(folder)
    if names is None:
        return False
    marked = TORN in names or all(n.startswith(".") and n.endswith(PARTIAL) for n in names)
    return MANIFEST not in names and marked


def has_manifest(folder: StorageFolder) -> bool:
    """Return True if a step's folder can be listed and has a manifest, valid or not."""
    return MANIFEST in (listed_names(folder) or ())


def partial_files(folder: StorageFolder) -> list[str]:
    """Return the incomplete files in a step's folder; none if the folder is a link."""
    names = [] if folder.is_link else folder.names()
    return [name for name in names if name.startswith(".") and name.endswith(PARTIAL)]


def remove_torn(folder: StorageFolder) -> StorageFolder | None:
    """Remove the files that saves wrote to a torn checkpoint, the mark last. Links are removed, but
    not their targets. Raise an ``OSError`` if a file cannot be removed.

    Returns:
        The folder's new path if it contains other files and was renamed; else None.
    """
    if not folder.is_link:
        _unlink(folder, [name for name in folder.names() if SHARD_FILE.fullmatch(name)])
    return _remove_emptied(folder)


def drop(folder: StorageFolder) -> StorageFolder | None:
    """Remove a checkpoint and the files in its manifest. It is marked as torn first, so that a
    partly deleted checkpoint looks neither valid nor damaged. Links are removed, but not their
    targets. Raise a ``CheckpointError`` if the manifest cannot be read, and a ``RunFileError`` if
    the checkpoint cannot be marked as torn and is unchanged.

    Returns:
        The folder's new path if it contains other files and was renamed; else None.
    """
    if folder.is_link:
        with writing(folder):
            folder.remove()
        return None
    shards = read_manifest(folder.place).files
    with writing(folder):
        folder.replace(TORN, b"")
        folder.unlink(MANIFEST)
    with suppress(OSError):  # remaining files are removed at the next start
        _unlink(folder, shards)
        return _remove_emptied(folder)
    return None


def _unlink(folder: StorageFolder, names: Iterable[str]) -> None:
    for name in names:
        with suppress(IsADirectoryError):  # not created by a save
            folder.unlink(name)


def _remove_emptied(folder: StorageFolder) -> StorageFolder | None:
    renamed = None
    if not folder.is_link:
        _unlink(folder, [name for name in partial_files(folder) if name != TORN])
        if set(folder.names()) - {TORN}:
            folder = renamed = set_aside(folder)
        folder.unlink(TORN)
    if renamed is None:
        folder.remove()
    return renamed


def set_aside(folder: StorageFolder) -> StorageFolder:
    """Rename a step's folder so that it does not count as a checkpoint. Return the renamed folder.
    Raise an ``OSError`` if the folder cannot be renamed."""
    names = folder.parent.names()
    number, new_name = 1, f"set-aside-{folder.name}"
    while new_name in names:
        number += 1
        new_name = f"set-aside-{folder.name}-{number}"
    return folder.rename(new_name)


def verified_manifest(folder: StorageFolder) -> Manifest:
    """Return the manifest of a checkpoint after verifying every byte. Raise a ``CheckpointError``
    if the checkpoint is not intact. Names file and cause."""
    manifest = read_manifest(folder.place)
    if folder.name != folder_name(manifest.step):
        raise CheckpointError(
            f"{folder} was renamed or copied: its {MANIFEST} is of step {manifest.step}"
        )
    verify_checkpoint(folder.place, manifest)
    return manifest
