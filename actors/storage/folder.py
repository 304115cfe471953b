"""Interface of a folder of files, its implementation for mounted file systems, and reading of small
files in folders that other users can write to."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

# Largest size in bytes of a JSON file: a manifest of a million tensors has half of it.
MOST_BYTES = 256 * 2**20
# Permissions for files that libraries create readable by their owner only: those of other new
# files.
_UMASK = os.umask(0o077)
os.umask(_UMASK)
FILE_MODE = 0o666 & ~_UMASK
# Suffix of a file until it is complete: it is named ``.{name}`` plus this.
PARTIAL = ".raymm-partial"


def read_plain(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file; links are followed. Raise an ``OSError`` if the file is
    not regular, is larger, or cannot be read."""
    with open_plain(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes, which is the limit")
    return data


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading. Opening never blocks, and has no effect on a device. Raise
    an ``OSError`` if the file is not regular, or cannot be opened."""
    _check_regular(os.stat(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _check_regular(os.fstat(descriptor))  # the file may have been replaced meanwhile
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(state: os.stat_result) -> None:
    if stat.S_ISDIR(state.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def is_plain_name(name: object) -> bool:
    """Return True for a string that is the name of a file in a folder, without path separators."""
    return isinstance(name, str) and name not in ("", ".", "..") and "\0" not in name and (
        Path(name).name == name
    )


class StorageFolder(ABC):
    """Folder that every process of a run can access by its location. A file is visible only when
    complete, except files written with ``writing``; their readers must verify them. File names may
    contain slashes. All operations raise ``OSError``, and ``FileNotFoundError`` for missing files.
    """

    @property
    @abstractmethod
    def location(self) -> str:
        """Return the location; :func:`raymm.actors.storage.location.storage_folder` opens it
        again."""

    @property
    @abstractmethod
    def place(self) -> Path | str:
        """Return its path; without a path, its location."""

    @property
    @abstractmethod
    def path(self) -> Path | None:
        """Return its path in this machine's file systems; None if it is elsewhere."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the last part of its location."""

    @property
    @abstractmethod
    def parent(self) -> StorageFolder:
        """Return the parent folder."""

    @abstractmethod
    def __truediv__(self, name: str) -> StorageFolder:
        """Return a subfolder; or, for messages only, the location of a file."""

    @property
    def is_link(self) -> bool:
        """True for a symbolic link, whose target may be outside the folder that the link is in."""
        return False

    @abstractmethod
    def names(self) -> list[str]:
        """Return the sorted names of files and folders in it; empty if it does not exist."""

    @abstractmethod
    def files(self) -> list[str]:
        """Return the sorted names of all files in it, recursively. Links count as files and are not
        followed."""

    @abstractmethod
    def create(self) -> None:
        """Create it and its missing parents."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the bytes of a file; on a disk, of a regular file of limited size."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Replace a file atomically; the new file is durable on return."""

    @abstractmethod
    def reading(self, name: str) -> AbstractContextManager[Path]:
        """Provide a local file with a file's bytes for the length of the block."""

    @abstractmethod
    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Provide a local path to write a file to; it is in the folder after the block."""

    @abstractmethod
    def unlink(self, name: str) -> None:
        """Remove a file or a link if it exists. The link's target stays."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the folder, which must be empty; if it is a link, remove only the link."""

    @abstractmethod
    def rename(self, name: str) -> StorageFolder:
        """Rename the folder, or the link, within its parent; return the new folder. Not atomic."""

    def __str__(self) -> str:
        return self.location

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageFolder) and other.location == self.location

    def __hash__(self) -> int:
        return hash(self.location)


class LocalFolder(StorageFolder):
    """Folder on a local or shared file system."""

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
        # A dangling link is not treated as a missing folder: a disk may not be mounted.
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
    """Replace a file atomically; the new file is on disk on return. Raise an ``OSError`` if the
    file cannot be written; the old file is unchanged."""
    try:
        _write_and_replace(path, data)
    except FileNotFoundError:
        # Another run that starts in the folder may have removed the temporary file as a leftover.
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
    """Give the files below a newly written folder the permissions of other new files, except links
    and files with further hard links, which belong to other folders, too."""
    for path in folder.rglob("*"):
        state = path.lstat()
        if stat.S_ISREG(state.st_mode) and state.st_nlink == 1:
            path.chmod(FILE_MODE)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk: after a crash, a file exists only if its entry was
    written."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
