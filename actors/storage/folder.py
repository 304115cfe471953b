"""A folder of files, wherever it is; and one of a file system that this machine has mounted."""

from __future__ import annotations

import os
import secrets
import stat
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from raymm.actors.storage.plain_file import read_plain

# Permissions of files that libraries create for their owner alone: those of all other files.
_UMASK = os.umask(0o077)
os.umask(_UMASK)
FILE_MODE = 0o666 & ~_UMASK
# What a file is called until it is whole: ``.{name}`` and this.
PARTIAL = ".raymm-partial"


class StorageFolder(ABC):
    """A folder that every process of a run can reach by its location.

    A file of it is there whole or not at all, except what is written under ``writing``; who reads
    that must have something to compare it with. Names of files may have slashes. All operations
    raise ``OSError``; what is missing is a ``FileNotFoundError``.
    """

    @property
    @abstractmethod
    def location(self) -> str:
        """What :func:`raymm.actors.storage.location.storage_folder` makes it of again."""

    @property
    @abstractmethod
    def place(self) -> Path | str:
        """Its path; where it has none, its location."""

    @property
    @abstractmethod
    def path(self) -> Path | None:
        """Its path in this machine's file systems; None if it is elsewhere."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of its location."""

    @property
    @abstractmethod
    def parent(self) -> StorageFolder:
        """The folder that it is in."""

    @abstractmethod
    def __truediv__(self, name: str) -> StorageFolder:
        """A folder in it; or, to name it to people, a file."""

    @property
    def is_link(self) -> bool:
        """True for a symbolic link, whose target may be outside the folder that the link is in."""
        return False

    @abstractmethod
    def names(self) -> list[str]:
        """Of the files and folders in it, sorted; none if it is not there."""

    @abstractmethod
    def files(self) -> list[str]:
        """Names of the files in it and in the folders in it, sorted. Links count as files and are
        not followed."""

    @abstractmethod
    def create(self) -> None:
        """Make it, and the folders that it is in, where they are missing."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the bytes of a file; on a disk, of a regular file of limited size."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Put a file in the place of another one, in one step; it is durable when this returns."""

    @abstractmethod
    def reading(self, name: str) -> AbstractContextManager[Path]:
        """A local file with a file's bytes, for the length of a block."""

    @abstractmethod
    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Where to write a file for the length of a block. It is in the folder afterwards."""

    @abstractmethod
    def unlink(self, name: str) -> None:
        """Remove a file or a link, if it is there. What the link leads to stays."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the folder, which must be empty; if it is a link, remove the link only."""

    @abstractmethod
    def rename(self, name: str) -> StorageFolder:
        """Give the folder, or the link, another name in its parent; returns it. Not in one step."""

    def __str__(self) -> str:
        return self.location

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageFolder) and other.location == self.location

    def __hash__(self) -> int:
        return hash(self.location)


class LocalFolder(StorageFolder):
    """A folder of a file system that this machine has mounted."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()

    @property
    def location(self) -> str:
        return str(self._path)

    @property
    def place(self) -> Path:
        return self._path

    @property
    def path(self) -> Path:
        return self._path

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def parent(self) -> LocalFolder:
        return LocalFolder(self._path.parent)

    def __truediv__(self, name: str) -> LocalFolder:
        return LocalFolder(self._path / name)

    @property
    def is_link(self) -> bool:
        return self._path.is_symlink()

    def names(self) -> list[str]:
        # A link that leads nowhere is no folder that is not there: a disk may be missing.
        return sorted(os.listdir(self._path)) if os.path.lexists(self._path) else []

    def files(self) -> list[str]:
        paths = self._path.rglob("*")
        return sorted(
            str(path.relative_to(self._path)) for path in paths
            if path.is_symlink() or path.is_file()
        )

    def create(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        for folder in (self._path, *list(self._path.parents)[:2]):
            sync_folder(folder)

    def read(self, name: str) -> bytes:
        return read_plain(self._path / name)

    def replace(self, name: str, data: bytes) -> None:
        replace_file(self._path / name, data)

    def reading(self, name: str) -> AbstractContextManager[Path]:
        return nullcontext(self._path / name)

    def writing(self, name: str) -> AbstractContextManager[Path]:
        return nullcontext(self._path / name)

    def unlink(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def remove(self) -> None:
        if self.is_link:
            self._path.unlink()
        else:
            self._path.rmdir()

    def rename(self, name: str) -> LocalFolder:
        return LocalFolder(self._path.rename(self._path.with_name(name)))


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file by another one, atomically; on disk when this returns.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    try:
        _write_and_replace(path, data)
    except FileNotFoundError:
        # Another run that begins in the folder may have removed the temporary file as a leftover.
        _write_and_replace(path, data)
    sync_folder(path.parent)


def _write_and_replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    with open(temporary, "xb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def set_file_modes(folder: Path) -> None:
    """Give the files below a folder that was just written the permissions of other new files. Links
    and files that have other names, too, stay as they are: those are of other folders."""
    for path in folder.rglob("*"):
        state = path.lstat()
        if stat.S_ISREG(state.st_mode) and state.st_nlink == 1:
            path.chmod(FILE_MODE)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk: files are there after a crash only with their names."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
