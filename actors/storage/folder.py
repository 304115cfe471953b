"""A folder of files, wherever it is; and one of a file system that this machine has mounted."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

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

    @abstractmethod
    def __truediv__(self, name: str) -> StorageFolder:
        """A folder in it; or, to name it to people, a file."""

    @abstractmethod
    def names(self) -> list[str]:
        """Of the files and folders in it, sorted; none if it is not there."""

    @abstractmethod
    def files(self) -> list[str]:
        """Names of the files in it and in the folders in it, sorted."""

    @abstractmethod
    def create(self) -> None:
        """Make it, and the folders that it is in, where they are missing."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A file's bytes."""

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
        """Remove a file, if it is there."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the folder and all that is in it."""

    @abstractmethod
    def rename(self, name: str) -> None:
        """Give it another name, beside what it was. Not in one step."""

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

    def __truediv__(self, name: str) -> LocalFolder:
        return LocalFolder(self._path / name)

    def names(self) -> list[str]:
        # A link that leads nowhere is no folder that is not there: a disk may be missing.
        return sorted(os.listdir(self._path)) if os.path.lexists(self._path) else []

    def files(self) -> list[str]:
        paths = self._path.rglob("*")
        return sorted(str(file.relative_to(self._path)) for file in paths if file.is_file())

    def create(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        for folder in (self._path, *list(self._path.parents)[:2]):
            sync_folder(folder)

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def replace(self, name: str, data: bytes) -> None:
        replace_file(self._path / name, data)

    def reading(self, name: str) -> AbstractContextManager[Path]:
        return nullcontext(self._path / name)

    def writing(self, name: str) -> AbstractContextManager[Path]:
        return nullcontext(self._path / name)

    def unlink(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self._path)

    def rename(self, name: str) -> None:
        self._path.rename(self._path.with_name(name))


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file by another one, atomically; on disk when this returns.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    temporary = path.with_name(f".{path.name}{PARTIAL}")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk: files are there after a crash only with their names."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
