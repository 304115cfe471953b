"""Outputs of commands: tested before any work is done, and named in errors."""

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
    """Output location: files in a folder, a file with related files, or a new folder.

    Attributes:
        files: names in that folder that will be written; other files are kept.
        new: True if the location must not exist yet.
    """

    field: str
    name: str
    expected: str
    path: Path
    files: tuple[str, ...] = ()
    new: bool = False

    @classmethod
    def folder(cls, field: str, name: str, *files: str) -> Output:
        """Return an output of files in a folder. ``field`` names it in errors. Raise a
        ``ConfigError`` if the name cannot be a path. The other kinds of output raise this, too."""
        return cls(field, name, expected := _FOLDER, _path(field, name, expected), files)

    @classmethod
    def file(cls, field: str, name: str, *suffixes: str) -> Output:
        """Return an output of a file, and of files with the same name and other suffixes."""
        path = _path(field, name, _FILE)
        files = (path.name, *(path.with_suffix(suffix).name for suffix in suffixes))
        return cls(field, name, _FILE, path.parent, files)

    @classmethod
    def new_folder(cls, field: str, name: str) -> Output:
        """Return an output of a folder that is put in place as a whole."""
        path = _path(field, name, _NEW_FOLDER)
        return cls(field, name, _NEW_FOLDER, path.parent, (path.name,), new=True)

    @property
    def target(self) -> Path:
        """The first file, or the new folder."""
        return self.path / self.files[0]

    def check(self) -> None:
        """Test the output by creating and removing missing folders and an empty file per name.
        Permissions are not a sufficient test: root has all of them in /proc, too. Raise a
        ``ConfigError`` if the location cannot be written. Names field, location and cause."""
        new_folders: list[Path] = []
        try:
            self._try_all(new_folders)
        finally:
            for folder in reversed(new_folders):
                with contextlib.suppress(OSError):  # another process has put a file there
                    folder.rmdir()

    def _try_all(self, new_folders: list[Path]) -> None:
        """Create the folder and test its files. Retry if another process, which created the folder
        for its own test, has just removed it."""
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
        # Files have a longer name while they are written.
        _touch(target.with_name(f".{file}.{secrets.token_hex(8)}{PARTIAL}"))

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """Create the folder, and name the output in errors from the block. Raise a ``ConfigError``
        if the location cannot be written. Names field, location and cause."""
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
        """Return RunFileError if the disk is full, as the name may be right; else ConfigError."""
        reason = error.strerror or str(error)
        if error.filename is not None:
            reason = f"{os.fsdecode(error.filename)}: {reason}"
        refusal = _refusal(self.field, self.name, self.expected, reason)
        return RunFileError(str(refusal)) if is_shortage(error) else refusal


# Maximum number of attempts while other processes remove the same folder.
_TRIES = 5
_FOLDER = "a folder that can be written"
_FILE = "a file that can be written"
_NEW_FOLDER = "a new folder in a place that can be written"


def with_home(name: str) -> str:
    """Expand a leading ``~`` or ``~user`` to that user's home folder. Raise a ``ValueError`` if
    there is no such user, so the name would create a folder that begins with ``~``."""
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
    except ValueError as error:  # an unknown user, or a surrogate
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
