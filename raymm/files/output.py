"""Where commands write: tried before any work is done, and named if it fails all the same."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from raymm.actors.storage.folder import PARTIAL
from raymm.errors import ConfigError, RunFileError
from raymm.files.run_files import is_shortage


@dataclass(frozen=True)
class Output:
    """What will be written: files of a folder, a file and what goes beside it, or a new folder.

    Attributes:
        field: what named it: a field of the configuration or an option.
        name: as it was given.
        expected: what is accepted there.
        path: of the folder that is written into, made where it is missing.
        files: names in that folder that will be written; others' are kept.
        new: what is named must not exist yet.
    """

    field: str
    name: str
    expected: str
    path: Path
    files: tuple[str, ...] = ()
    new: bool = False

    @classmethod
    def folder(cls, field: str, name: str, *files: str) -> Output:
        """A folder, and files in it.

        Args:
            field: that names it, for errors.
            name: what was given.
            *files: that are to be in it.

        Raises:
            ConfigError: no place can have that name, as for all kinds of output.
        """
        return cls(field, name, expected := _FOLDER, _path(field, name, expected), files)

    @classmethod
    def file(cls, field: str, name: str, *suffixes: str) -> Output:
        """A file, and others of its name that end otherwise.

        Args:
            field: that names it, for errors.
            name: what was given.
            *suffixes: of the others.

        Raises:
            ConfigError: no place can have that name.
        """
        path = _path(field, name, _FILE)
        files = (path.name, *(path.with_suffix(suffix).name for suffix in suffixes))
        return cls(field, name, _FILE, path.parent, files)

    @classmethod
    def new_folder(cls, field: str, name: str) -> Output:
        """A folder that is put in place as a whole."""
        path = _path(field, name, _NEW_FOLDER)
        return cls(field, name, _NEW_FOLDER, path.parent, (path.name,), new=True)

    @property
    def target(self) -> Path:
        """The first file, or the new folder."""
        return self.path / self.files[0]

    def check(self) -> None:
        """Try it: make what is missing and an empty file by every name, and remove them again.
        Looking at permissions would not do: root has all of them in /proc too.

        Raises:
            ConfigError: naming the field, the place and what is in the way.
        """
        new_folders: list[Path] = []
        try:
            self._try_all(new_folders)
        finally:
            for folder in reversed(new_folders):
                with contextlib.suppress(OSError):  # another process has put something there
                    folder.rmdir()

    def _try_all(self, new_folders: list[Path]) -> None:
        """Make the folder and try its files, again where another process has just removed the
        folder, which it had made to try it.

        Args:
            new_folders: gets the folders that are made.
        """
        for tries_left in reversed(range(_TRIES)):
            try:
                self._make_folders(new_folders)
                for file in self.files:
                    self._try_file(file)
                if not self.files:
                    _touch(self.path / f".{secrets.token_hex(8)}{PARTIAL}")
                return
            except FileNotFoundError as error:
                if not tries_left:
                    raise self._refused(error) from None
            except OSError as error:
                raise self._refused(error) from None

    def _make_folders(self, new_folders: list[Path]) -> None:
        missing, path = [], self.path.absolute()
        while not path.exists():
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            try:
                folder.mkdir()
            except FileExistsError:
                if not folder.is_dir():
                    raise
            else:
                new_folders.append(folder)

    def _try_file(self, file: str) -> None:
        target = self.path / file
        if self.new and os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "it exists", str(target))
        if not self.new and target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(target))
        # Files have a longer name until they are whole.
        _touch(target.with_name(f".{file}.{secrets.token_hex(8)}{PARTIAL}"))

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """Make the folder, and name it where writing fails in the block.

        Raises:
            ConfigError: naming the field, the place and what is in the way.
        """
        new_folders: list[Path] = []
        try:
            self._try_all(new_folders)
        except (ConfigError, RunFileError):
            for folder in reversed(new_folders):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
        try:
            yield self.path
        except OSError as error:
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> ConfigError | RunFileError:
        """Return the error to raise: what is named may be right, if the disk is full now."""
        reason = error.strerror or str(error)
        if error.filename is not None:
            reason = f"{os.fsdecode(error.filename)}: {reason}"
        refusal = _refusal(self.field, self.name, self.expected, reason)
        return RunFileError(str(refusal)) if is_shortage(error) else refusal


# Another process that begins in the same folder may remove it so many times.
_TRIES = 5
_FOLDER = "a folder that can be written"
_FILE = "a file that can be written"
_NEW_FOLDER = "a new folder in a place that can be written"


def with_home(name: str) -> str:
    """A leading ``~`` or ``~user`` as that user's home folder.

    Raises:
        ValueError: there is no such user; the name would make a folder that begins with ``~``.
    """
    expanded = os.path.expanduser(name)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ValueError(f"there is no user {user[1:]!r}; ./{user} is a folder of that name")
    return expanded


def _path(field: str, name: str, expected: str) -> Path:
    if not name.strip() or "\0" in name:
        raise _refusal(field, name, expected, "it is empty or contains a null character")
    try:
        path = Path(with_home(name))
        os.fsencode(path)
    except ValueError as error:  # a home of nobody; a surrogate
        raise _refusal(field, name, expected, str(error)) from None
    if expected != _FOLDER and path.name in ("", ".."):
        raise _refusal(field, name, expected, "it has no file or folder name")
    return path


def _refusal(field: str, name: str, expected: str, reason: str) -> ConfigError:
    return ConfigError(f"{field} is {name!r}; expected {expected}: {reason}")


def _touch(path: Path) -> None:
    with open(path, "x"):
        pass
    path.unlink(missing_ok=True)
