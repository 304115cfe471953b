"""One run at a time in a folder, on any file system that the runs share (NFS too).

``owner.json`` names the process that owns the folder, and its modification time is renewed while
that process lives. It appears by ``link(2)``, which is atomic everywhere and fails where there is
one. When its process is gone, whoever links ``.owner-after-{token}``, of which there can be one
only, is the next owner, and renames that over ``owner.json``. So nobody ever removes a file that
could have become another's.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from raymm.actors.storage.plain_file import open_plain
from raymm.errors import RunError
from raymm.files.config_error import ConfigError
from raymm.files.run_files import RunFileError, is_shortage

OWNER = "owner.json"
# Seconds between two signs of life of an owner.
HEARTBEAT_S = 5.0
# An owner whose process cannot be looked at, as it is on another machine, is gone after so many
# seconds without one.
GONE_AFTER_S = 60.0
# Seconds between two looks for a sign of life.
LOOK_S = 0.5

# Bytes that are read of a file that names an owner.
_MOST_BYTES = 2**16
_TOKEN = re.compile(r"[0-9a-f]{32}")
_TYPES = {
    "host": str, "pid": int, "started": int | None, "boot": str | None, "namespace": int | None,
    "since": str, "token": str,
}


class RunOwnedError(ConfigError):
    """A folder that another run owns. Names its host, its process, and since when."""


class OwnerLostError(RunError, RuntimeError):
    """The folder that this run had owned belongs to another one, or to nobody."""


@dataclass(frozen=True)
class Owner:
    """A process that owns a folder.

    Attributes:
        host: its name.
        pid: its number.
        started: when it started, in clock ticks since the machine did; None if not known.
        boot: of the machine; None if not known.
        namespace: of process numbers; None if not known.
        since: when it became the owner, ISO 8601.
        token: of this ownership alone.
    """

    host: str
    pid: int
    started: int | None
    boot: str | None
    namespace: int | None
    since: str
    token: str

    @classmethod
    def this_process(cls) -> Owner:
        """This process, from now on."""
        return cls(
            platform.node(), os.getpid(), _started(os.getpid()), *_place(),
            datetime.now(UTC).isoformat(timespec="seconds"), secrets.token_hex(16),
        )

    @classmethod
    def from_bytes(cls, text: bytes, version: object) -> Owner:
        """The owner that a file names. One that names none has an owner of whom only signs of life
        can be seen.

        Args:
            text: the file's.
            version: what tells this file from others that name nobody.
        """
        try:
            owner = cls(**json.loads(text))
            if all(isinstance(getattr(owner, name), kind) for name, kind in _TYPES.items()):
                if _TOKEN.fullmatch(owner.token):
                    return owner
        except (ValueError, TypeError, RecursionError):
            pass
        token = f"unreadable-{version}"
        return cls("an unknown host", 0, None, None, None, "an unknown time", token)

    def is_gone(self) -> bool | None:
        """Whether its process has ended; None if that cannot be seen from this process."""
        if self.boot is None or None in (self.namespace, self.started):
            return None
        if (self.boot, self.namespace) != _place():
            return None
        return _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def owned(folder: object, owner: Owner) -> str:
    """What to say of a run folder that another run owns."""
    return (
        f"run.storage_path is {str(folder)!r}, which belongs to a run that goes on: {owner}. Wait "
        "for its end or end it, or give another storage_path. Once it is gone, the next run takes "
        "the folder over by itself"
    )


def _lost(folder: object, file: object, owner: Owner | None) -> str:
    """What to say of a run folder that was this run's.

    Args:
        folder: as people know it.
        file: that said so.
        owner: whom that file names now; None if it is gone.
    """
    whose = f"{file} is gone" if owner is None else f"it belongs to {owner}"
    return (
        f"{folder} is this run's no more; {whose}. Was it stopped for long, or was that file "
        "removed?"
    )


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks; None if there is none, or it has ended."""
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if values[0] in "ZX" else int(values[19])


def _place() -> tuple[str | None, int | None]:
    """What process numbers mean something in: the machine's boot, and the namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None, None


class FolderOwner(ABC):
    """Owns a folder for the length of a ``with`` block. How is for those who are derived from it.

    Args:
        folder: in errors.
        expected: what that should be, in errors.
        say: is told when it waits, and whom it has followed.

    Raises:
        RunOwnedError: on entering: it is another's, who lives.
        ConfigError: on entering: the folder cannot be written.
        RunFileError: on entering: its disk is full.
    """

    def __init__(self, folder: object, expected: str, say: Callable[[str], None]) -> None:
        self._place, self._expected, self._say = folder, expected, say
        self._me = Owner.this_process()
        self._left = threading.Event()
        self._beating: threading.Thread | None = None

    @abstractmethod
    def _acquire(self) -> None:
        """Own it.

        Raises:
            RunOwnedError: it is another's.
            OSError: it cannot be written.
        """

    @abstractmethod
    def _owner(self) -> Owner | None:
        """Whom the file names; None if there is none.

        Raises:
            OSError: it cannot be read.
        """

    @abstractmethod
    def _give_sign(self) -> None:
        """A sign of life, in the file that is this process's.

        Raises:
            OSError: it cannot be written.
        """

    @abstractmethod
    def _give_up(self) -> None:
        """Remove the file that is this process's.

        Raises:
            OSError: it cannot be removed.
        """

    def __enter__(self) -> Self:
        try:
            self._acquire()
        except OSError as error:
            text = f"run.storage_path is {str(self._place)!r}; expected {self._expected}: {error}"
            raise (RunFileError if is_shortage(error) else ConfigError)(text) from None
        self._beating = threading.Thread(target=self._beat, name="raymm-owner", daemon=True)
        self._beating.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._beating is not None:
            self._beating.join()
        # Else it is seen to be gone: by its process, or by its signs of life.
        with contextlib.suppress(OSError):
            if self._owner() == self._me:
                self._give_up()

    def check(self) -> None:
        """Before something that only the owner may do.

        Raises:
            OwnerLostError: it is this run no more.
            RunFileError: that cannot be seen.
        """
        file = f"{self._place}/{OWNER}"
        try:
            owner = self._owner()
        except OSError as error:
            raise RunFileError(f"cannot read {file}: {error.strerror or error}") from error
        if owner != self._me:
            raise OwnerLostError(_lost(self._place, file, owner))

    def _beat(self) -> None:
        while not self._left.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):  # it comes back; else `check` says so
                if self._owner() == self._me:
                    self._give_sign()


class RunOwner(FolderOwner):
    """Owns a folder of a file system.

    Args:
        folder: an existing one.
        say: as of :class:`FolderOwner`.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
        super().__init__(folder, "a folder that can be written", say)
        self._folder, self._file = folder, folder / OWNER
        self._own_copy = folder / f".owner-{self._me.token}"

    def _owner(self) -> Owner | None:
        return _read(self._file)

    def _give_sign(self) -> None:
        os.utime(self._file)

    def _give_up(self) -> None:
        self._file.unlink()

    def _acquire(self) -> None:
        try:
            _write_new(self._own_copy, self._me)
            self._follow()
        finally:
            with contextlib.suppress(OSError):  # where nothing can be written, nothing was
                self._own_copy.unlink(missing_ok=True)

    def _follow(self) -> None:
        while True:
            if self._link(self._file):
                return
            if (last := self._last()) is None:
                continue  # it has just been given up
            path, owner = last
            if not self._sees_gone(path, owner):
                continue  # it is another's by now
            claim = self._claim(owner)
            if not self._link(claim):
                continue  # somebody was faster
            # There is one claim on each owner at a time. It holds if the owner had not been
            # followed, and that claim renamed, in the meantime.
            latest = self._last()
            if latest is None or latest[1] != self._me:
                claim.unlink()
                continue
            os.replace(claim, self._file)
            self._say(f"the run folder belonged to {owner}, which is gone")
            for left in self._folder.glob(".owner-*"):
                if (other := _read(left)) is not None and other.is_gone():
                    left.unlink(missing_ok=True)
            return

    def _claim(self, owner: Owner) -> Path:
        return self._folder / f".owner-after-{owner.token}"

    def _last(self) -> tuple[Path, Owner] | None:
        """The owner, or who follows the owner and has not yet put itself in the place; with its
        file. None if there is none."""
        path = self._file
        owner = _read(path)
        while owner is not None:
            following = _read(claim := self._claim(owner))
            if following is None:
                return path, owner
            path, owner = claim, following
        return None

    def _link(self, path: Path) -> bool:
        """Put this process's file in a place where there is none; whether it is there."""
        try:
            os.link(self._own_copy, path)
        except FileExistsError:
            # NFS may repeat a request that has been carried out.
            return _read(path) == self._me
        except OSError:  # a file system without hard links
            try:
                _write_new(path, self._me)
            except FileExistsError:
                return False
        return True

    def _sees_gone(self, path: Path, owner: Owner) -> bool:
        """Wait until it is known whether an owner is gone; False if the file is another one by
        then.

        Raises:
            RunOwnedError: it lives.
        """
        gone = owner.is_gone()
        if gone is None:
            gone = self._stays_silent(path)
            if _read(path) != owner:
                return False
        if not gone:
            raise RunOwnedError(owned(self._folder, owner))
        return True

    def _stays_silent(self, path: Path) -> bool:
        """Whether there is no sign of life for as long as an owner that lives would be silent."""
        beat = _beat_of(path)
        if beat is None:
            return False
        # Both times are of the file system's clock, so other machines' clocks do not matter.
        silent = max(self._own_copy.stat().st_mtime - beat, 0.0)
        deadline = time.monotonic() + GONE_AFTER_S - silent
        if silent < GONE_AFTER_S:
            self._say(
                f"the run folder belongs to {_read(path)}; looking for a sign of life for at most "
                f"{GONE_AFTER_S - silent:.0f} s"
            )
        while time.monotonic() < deadline:
            time.sleep(LOOK_S)
            if _beat_of(path) != beat:
                return False
        return True


def _write_new(path: Path, owner: Owner) -> None:
    """
    Raises:
        FileExistsError: there is one.
    """
    with open(path, "x", encoding="utf-8") as file:
        json.dump(asdict(owner), file)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Owner | None:
    """The owner that a file names; None if there is no file."""
    try:
        with open_plain(path) as file:
            text, inode = file.read(_MOST_BYTES), os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return None
    return Owner.from_bytes(text, inode)


def _beat_of(path: Path) -> float | None:
    """When a file's owner gave its last sign of life, by the file system's clock. Opened anew:
    NFS then asks the server."""
    try:
        with open_plain(path) as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
