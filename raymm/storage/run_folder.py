"""Working folder of a run: its storage, or a local folder that is mirrored to a bucket."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raymm.actors.rank.rank_group import RankGroup
from raymm.actors.storage.folder import PARTIAL, LocalFolder, StorageFolder
from raymm.actors.storage.location import storage_folder
from raymm.errors import ConfigError, RunFileError
from raymm.files.output import Output
from raymm.files.run_files import is_shortage, writing
from raymm.files.run_owner import OWNER, BucketOwner, RunOwner

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
