"""Working folder of a run, and the lease on it, so that one run at a time writes there.

The working folder is the storage, or a local folder that is mirrored to a bucket.

``owner.json`` names the process that owns the folder, which renews the file while it lives. The
lease is taken over once that process has ended, or has been silent for :data:`GONE_AFTER_S`. There
are two ways to take it:

- :class:`RunOwner`, on any file system (NFS too): ``link(2)`` is atomic and fails if the file
  exists. After an owner has gone, the process that links ``.owner-after-{token}`` is the next
  owner, and renames that file to ``owner.json``. No process removes a file that another one may
  own.
- :class:`BucketOwner`, in a bucket, where files can only be replaced, by Fischer's algorithm: write
  your name, wait for longer than any process may take between reading and writing, and own the
  folder if your name is still there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Self

from raymm.actors.rank.rank_group import RankGroup
from raymm.actors.storage.folder import PARTIAL, LocalFolder, StorageFolder, open_plain
from raymm.actors.storage.location import storage_folder
from raymm.errors import ConfigError, RunError, RunFileError
from raymm.files.output import Output
from raymm.files.run_files import is_shortage, writing

OWNER = "owner.json"
# Seconds between two heartbeats of an owner.
HEARTBEAT_S = 5.0
# An owner on another machine counts as gone after so many seconds without a heartbeat.
GONE_AFTER_S = 60.0
# Seconds between two checks for a heartbeat.
LOOK_S = 0.5
# In a bucket: seconds between writing a name and owning the folder. At most half of them may pass
# between the read that found no owner and the write.
SETTLE_S = 2.0
# In a bucket: seconds for which a verified owner is not read again, because steps may be short.
SEEN_S = 1.0

# Maximum number of bytes that are read from an owner file.
_MOST_BYTES = 2**16
_TOKEN = re.compile(r"[0-9a-f]{32}")
_TYPES = {
    "host": str, "pid": int, "started": int | None, "boot": str | None, "namespace": int | None,
    "since": str, "token": str,
}


@dataclass(frozen=True)
class Owner:
    """Process that owns a folder.

    Attributes:
        started: start time in clock ticks since the machine's boot; None if unknown.
        since: start of the ownership, ISO 8601.
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
        """Return this process as an owner from now on."""
        return cls(
            platform.node(), os.getpid(), _started(os.getpid()), *_place(),
            datetime.now(UTC).isoformat(timespec="seconds"), secrets.token_hex(16),
        )

    @classmethod
    def from_bytes(cls, text: bytes, version: object) -> Owner:
        """Return the owner named by a file. An unreadable file gives an owner that only its
        heartbeats can show to be alive.

        Args:
            version: distinguishes this unreadable file from others.
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
        """Return True if the process has ended; None if that cannot be seen from this process."""
        if self.boot is None or None in (self.namespace, self.started):
            return None
        if (self.boot, self.namespace) != _place():
            return None
        return _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def _started(pid: int) -> int | None:
    """Return the start time of a live process in clock ticks, or None."""
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if values[0] in "ZX" else int(values[19])


def _place() -> tuple[str | None, int | None]:
    """Return the boot id and the namespace in which process ids are valid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None, None


class FolderOwner(ABC):
    """Lease on a folder for the length of a ``with`` block. Subclasses implement the lease file.

    Args:
        say: called with a line when the lease waits or is taken over.

    Raises:
        ConfigError: on entering, if the folder belongs to another active run or cannot be written.
        RunFileError: on entering, if the disk is full.
    """

    def __init__(self, place: object, expected: str, say: Callable[[str], None]) -> None:
        self._place, self._expected, self._say = place, expected, say
        self._me = Owner.this_process()
        self._left = threading.Event()
        self._beating: threading.Thread | None = None

    @abstractmethod
    def _acquire(self) -> None:
        """Take the lease, or raise ConfigError or OSError."""

    @abstractmethod
    def _owner(self) -> Owner | None:
        """Read the owner from the file; None without a file."""

    @abstractmethod
    def _give_sign(self) -> None:
        """Renew the heartbeat in this process's file."""

    @abstractmethod
    def _give_up(self) -> None:
        """Remove this process's file."""

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
        # If this fails, others see by the process or its silence that the owner is gone.
        with contextlib.suppress(OSError):
            if self._owner() == self._me:
                self._give_up()

    def check(self) -> None:
        """Check the lease before an action that only the owner may take. Raise a ``RunError`` if
        the folder does not belong to this run any more, and a ``RunFileError`` if the file cannot
        be read."""
        file = f"{self._place}/{OWNER}"
        try:
            owner = self._owner()
        except OSError as error:
            raise RunFileError(f"cannot read {file}: {error.strerror or error}") from error
        if owner != self._me:
            whose = f"{file} is gone" if owner is None else f"it belongs to {owner}"
            raise RunError(
                f"{self._place} no longer belongs to this run: {whose}. Was the run paused for a "
                "long time, or was the file removed?"
            )

    def _beat(self) -> None:
        while not self._left.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):  # the error may be temporary; else check() raises
                if self._owner() == self._me:
                    self._give_sign()

    def _sees_gone(
        self, owner: Owner, sign: Callable[[], object], current: Callable[[], Owner | None],
        silent: Callable[[], float] = lambda: 0.0,
    ) -> bool:
        """Wait until it is known if an owner is gone; raise ConfigError if it is alive.

        Args:
            sign: reads its latest heartbeat; None without a file.
            current: reads the owner that the file names now.
            silent: returns the known seconds since the latest heartbeat.

        Returns:
            False if the file has changed meanwhile.
        """
        gone = owner.is_gone()
        if gone is None:
            gone = self._stays_silent(owner, sign, silent)
            if gone and current() != owner:
                return False
        if gone:
            return True
        if current() != owner:
            return False
        raise ConfigError(
            f"run.storage_path is {str(self._place)!r}, which belongs to an active run: "
            f"{owner}. Wait until it ends, end it, or set another storage_path. Once it has ended, "
            "the next run takes over the folder"
        )

    def _stays_silent(
        self, owner: Owner, sign: Callable[[], object], silent: Callable[[], float]
    ) -> bool:
        """Return True if there is no heartbeat for longer than a live owner may be silent."""
        first_sign = sign()
        if first_sign is None:
            return False
        wait_s = GONE_AFTER_S - silent()
        if wait_s > 0:
            self._say(
                f"the run folder belongs to {owner}; waiting for its next heartbeat for at most "
                f"{wait_s:.0f} s"
            )
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            time.sleep(LOOK_S)
            if sign() != first_sign:
                return False
        return True


class RunOwner(FolderOwner):
    """Lease on an existing folder of a file system."""

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
            with contextlib.suppress(OSError):  # if nothing can be written, nothing was written
                self._own_copy.unlink(missing_ok=True)

    def _follow(self) -> None:
        while True:
            if self._link(self._file):
                return
            if (last := self._last()) is None:
                continue  # the file was just removed
            path, owner = last
            looks = partial(_beat_of, path), partial(_read, path), partial(self._silent, path)
            if not self._sees_gone(owner, *looks):
                continue  # another process owns the folder by now
            claim = self._claim(owner)
            if not self._link(claim):
                continue  # another process was faster
            # Each owner has at most one claim at a time. The claim is valid if no other process has
            # followed the owner and renamed its claim in the meantime.
            latest = self._last()
            if latest is None or latest[1] != self._me:
                claim.unlink()
                continue
            os.replace(claim, self._file)
            self._say(f"the run folder belonged to {owner}, which is gone")
            for old_claim in self._folder.glob(".owner-*"):
                if (claimant := _read(old_claim)) is not None and claimant.is_gone():
                    old_claim.unlink(missing_ok=True)
            return

    def _claim(self, owner: Owner) -> Path:
        return self._folder / f".owner-after-{owner.token}"

    def _last(self) -> tuple[Path, Owner] | None:
        """Return the owner, or the process that follows it but has not replaced the file yet, and
        its file."""
        path = self._file
        owner = _read(path)
        while owner is not None:
            following = _read(claim := self._claim(owner))
            if following is None:
                return path, owner
            path, owner = claim, following
        return None

    def _link(self, path: Path) -> bool:
        """Link this process's file to a path. Return True if it is there afterwards."""
        try:
            os.link(self._own_copy, path)
        except FileExistsError:
            # NFS may repeat a request that was already executed.
            return _read(path) == self._me
        except OSError:  # a file system without hard links
            try:
                _write_new(path, self._me)
            except FileExistsError:
                return False
        return True

    def _silent(self, path: Path) -> float:
        """Return the seconds since a heartbeat by the file system's clock, not by the machines'
        clocks."""
        beat = _beat_of(path)
        return 0.0 if beat is None else max(self._own_copy.stat().st_mtime - beat, 0.0)


class BucketOwner(FolderOwner):
    """Lease on a folder of a bucket. Its heartbeat is a counter."""

    def __init__(self, folder: StorageFolder, say: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(folder, "a bucket that can be read and written", say)
        self._folder = folder
        self._beats, self._seen_at = 0, float("-inf")

    def check(self) -> None:
        if time.monotonic() - self._seen_at < SEEN_S:
            return
        super().check()
        self._seen_at = time.monotonic()

    def _acquire(self) -> None:
        while True:
            read_at = time.monotonic()
            text = self._text()
            owner = None
            if text is not None:
                owner = _owner_of(text)
                if owner != self._me and not self._sees_gone(owner, self._text, self._owner):
                    continue  # the owner has left or changed
                read_at = time.monotonic()
                if self._text() != text:
                    continue
            self._give_sign()
            if time.monotonic() - read_at > SETTLE_S / 2:
                time.sleep(SETTLE_S)
                continue  # too late: another process may have settled meanwhile
            time.sleep(SETTLE_S)
            if self._owner() == self._me:
                if owner is not None and owner != self._me:
                    self._say(f"the run folder belonged to {owner}, which is gone")
                return

    def _text(self) -> bytes | None:
        try:
            return self._folder.read(OWNER)
        except FileNotFoundError:
            return None

    def _owner(self) -> Owner | None:
        text = self._text()
        return None if text is None else _owner_of(text)

    def _give_up(self) -> None:
        self._folder.unlink(OWNER)

    def _give_sign(self) -> None:
        self._beats += 1
        values = {"owner": asdict(self._me), "beats": self._beats}
        self._folder.replace(OWNER, json.dumps(values).encode())


def _write_new(path: Path, owner: Owner) -> None:
    with open(path, "x", encoding="utf-8") as file:
        json.dump(asdict(owner), file)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Owner | None:
    """Read the owner from a file; None without a file."""
    try:
        with open_plain(path) as file:
            text, inode = file.read(_MOST_BYTES), os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return None
    return Owner.from_bytes(text, inode)


def _beat_of(path: Path) -> float | None:
    """Return the file system's time of a heartbeat. Opening the file makes NFS query the server."""
    try:
        with open_plain(path) as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def _owner_of(text: bytes) -> Owner:
    try:
        values = json.loads(text)
        inner = json.dumps(values["owner"]).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        inner = b""
    return Owner.from_bytes(inner, "in a bucket")


# Not mirrored: checkpoints are written to the storage directly.
_CHECKPOINTS = "checkpoints/"
# Seconds for which a run that ends with an error tries to save its logs.
LAST_TRY_S = 5.0


class RunFolder:
    """Folder for a run's files other than checkpoints: logs, pictures, the plan. A run in a bucket
    works in a folder of the driver's machine. It starts with a copy of the bucket's files. Changed
    files are uploaded as a whole before each commit of a checkpoint, so that the checkpoint has its
    logs, and when the run ends."""

    def __init__(self, location: str) -> None:
        self.storage: StorageFolder = storage_folder(location)
        self.path: Path = self.storage.path or _working_folder(self.storage)
        self._location = location
        self._is_mirrored = self.storage.path is None
        self._mirrored: dict[str, tuple[int, int]] = {}

    def __str__(self) -> str:
        return f"{self.storage} (here in {self.path})" if self._is_mirrored else str(self.path)

    def check(self) -> None:
        """Create the folder, and try to write to it. Raise a ``ConfigError`` if the folder cannot
        be written, and a ``RunFileError`` if the disk is full."""
        name = str(self.path) if self._is_mirrored else self._location
        with Output.folder("run.storage_path", name).writing():
            pass
        token = f".{secrets.token_hex(8)}{PARTIAL}"
        try:
            self.storage.replace(token, b"")
            self.storage.unlink(token)
        except OSError as error:
            text = (
                f"run.storage_path is {self._location!r}; expected a folder that can be written: "
                f"{error}"
            )
            raise (RunFileError if is_shortage(error) else ConfigError)(text) from None

    @contextmanager
    def owned(self, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
        """Hold the lease on the folder within the block. Yields a function that raises if the lease
        is lost. Raise a ``ConfigError`` if another active run holds the lease, and a
        ``ConfigError`` or ``RunFileError`` if the folder cannot be read or written."""
        with RunOwner(self.path, say) as owner:
            if not self._is_mirrored:
                yield owner.check
                return
            with BucketOwner(self.storage, say) as bucket_owner:
                self._fetch()
                try:
                    yield bucket_owner.check
                except BaseException:
                    with suppress(RunFileError):
                        self.mirror(LAST_TRY_S)
                    raise
                self.mirror()

    def mirror(self, retry_for_s: float | None = None) -> None:
        """Upload the files that changed since the last call, each atomically. Raise a
        ``RunFileError`` if a file cannot be written."""
        if not self._is_mirrored:
            return
        target = self.storage
        if retry_for_s is not None:
            target = storage_folder(self._location, retry_for_s)
        for name in self._own_files():
            path = self.path / name
            if path.is_symlink():  # its target may be anywhere
                continue
            with writing(target / name):
                state = path.stat()
                version = (state.st_mtime_ns, state.st_size)
                if self._mirrored.get(name) != version:
                    target.replace(name, path.read_bytes())
                    self._mirrored[name] = version

    def _own_files(self) -> list[str]:
        return [name for name in LocalFolder(self.path).files() if _is_mirrored(name)]

    def _fetch(self) -> None:
        """Replace the local files by those of the storage."""
        try:
            for name in self._own_files():
                (self.path / name).unlink()
            for name in filter(_is_mirrored, self.storage.files()):
                path = self.path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.storage.read(name))
                state = path.stat()
                self._mirrored[name] = (state.st_mtime_ns, state.st_size)
        except OSError as error:
            raise ConfigError(
                f"run.storage_path is {self._location!r}; its content cannot be copied to "
                f"{self.path}: {error}"
            ) from None

    def check_seen_by(self, group: RankGroup) -> None:
        """Check that all ranks see and can write to the same folder. A path may lead elsewhere on
        another node. Raise a ``ConfigError`` if a rank's node has another folder at the path, or
        cannot write to it."""
        token = secrets.token_hex(16)
        name = f".seen-{token}{PARTIAL}"
        try:
            with writing(self.storage / name):
                self.storage.replace(name, token.encode())
            answers = group.call("sees", self.storage.location, name, token)
        finally:
            with suppress(OSError):
                self.storage.unlink(name)
        for process, problem in zip(group.places, answers, strict=True):
            if problem is not None:
                raise ConfigError(
                    f"run.storage_path is {self._location!r}; expected a folder that all nodes "
                    f"share, or a bucket that all may write to: {process.label} on {process.host} "
                    f"{problem}. Accepted: a file system that is mounted at that path on every "
                    "node (NFS, ...), or s3:// or gs:// with credentials on every node"
                )


def _is_mirrored(name: str) -> bool:
    # Names in a bucket are not trusted: ".." would lead out of the working folder.
    parts = name.split("/")
    outside = not parts[0] or ".." in parts
    hidden = parts[-1].startswith(".")
    return not (outside or hidden or name.startswith(_CHECKPOINTS) or name == OWNER)


def _working_folder(storage: StorageFolder) -> Path:
    """Return the folder for a storage below ``$RAYMM_CACHE``, or ``~/.cache/raymm``."""
    base = Path(os.environ.get("RAYMM_CACHE") or Path.home() / ".cache" / "raymm")
    digest = hashlib.sha256(storage.location.encode()).hexdigest()[:12]
    return base.absolute() / "runs" / f"{storage.name}-{digest}"
