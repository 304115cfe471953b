"""The folders of a run's checkpoints, by their steps."""

from __future__ import annotations

import re
from contextlib import suppress

from raymm.actors.storage.folder import PARTIAL, StorageFolder
from raymm.files.run_files import writing
from raymm.storage.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    read_manifest,
    verify_checkpoint,
)

CHECKPOINTS = "checkpoints"
"""The folder in a run's that they are in."""
_NAME = re.compile(r"step-(\d{8,})")
TORN = f".not-committed{PARTIAL}"
"""In folders that are no checkpoint yet, or no more."""


def folder_name(step: int) -> str:
    """Of the checkpoint of a step."""
    return f"step-{step:08d}"


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


def is_torn(folder: StorageFolder) -> bool:
    """Whether a folder is what a save that was never committed has left. One that has lost its
    manifest otherwise is a damaged checkpoint."""
    try:
        names = folder.names()
    except NotADirectoryError:
        return False
    marked = TORN in names or all(n.startswith(".") and n.endswith(PARTIAL) for n in names)
    return MANIFEST not in names and marked


def remove_torn(folder: StorageFolder) -> None:
    """Remove one that is torn, the mark that says so last.

    Raises:
        OSError: something of it cannot be removed.
    """
    for name in folder.files():
        if name != TORN:
            folder.unlink(name)
    folder.remove()


def drop(folder: StorageFolder) -> None:
    """Remove a checkpoint: a half-deleted one must not look valid, nor damaged.

    Raises:
        RunFileError: it cannot be made invalid; it is as it was, then.
    """
    with writing(folder):
        folder.replace(TORN, b"")
        folder.unlink(MANIFEST)
    with suppress(OSError):  # what stays is removed at the next start
        remove_torn(folder)


def verified_manifest(folder: StorageFolder) -> Manifest:
    """The manifest of a checkpoint whose every byte is what was written.

    Raises:
        CheckpointError: it is not; says which file, and why.
    """
    manifest = read_manifest(folder.place)
    if folder.name != folder_name(manifest.step):
        raise CheckpointError(
            f"{folder} is of step {manifest.step}, as its {MANIFEST} says: it was renamed or copied"
        )
    verify_checkpoint(folder.place, manifest)
    return manifest
