"""The cache folder: everything in it is whole, because it gets there by one rename.

Work happens in ``.tmp-*`` folders of the same file system, and only the holder of the lock
makes them. A run that dies leaves its ``.tmp-*`` behind and the kernel drops its lock, so the
next holder knows that whatever ``.tmp-*`` it finds is dead.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

CACHE_VARIABLE = "RAYMM_CACHE"
_MARKER = "PREPARED.json"  # in every committed folder: what it was made from
_TEMP_PREFIX = ".tmp-"


def default_root() -> Path:
    """``$RAYMM_CACHE``, or ``~/.cache/raymm``."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/raymm").expanduser()


class Cache:
    """A cache folder and what it holds. Paths are relative to ``root``, as ``models/NAME``."""

    def __init__(self, root: str | Path):
        self.root = Path(root).expanduser().resolve()

    def holds(self, name: str, recipe: dict) -> bool:
        """Return True if folder ``name`` was committed with exactly this ``recipe``."""
        try:
            return json.loads((self.root / name / _MARKER).read_text()) == recipe
        except (OSError, ValueError):
            return False

    def leftovers(self) -> list[Path]:
        """Temporary folders of dead runs (or, without the lock, of a running one)."""
        return sorted(self.root.glob(f"{_TEMP_PREFIX}*"))

    @contextlib.contextmanager
    def locked(self, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the cache alone and clear the leftovers of dead runs.

        ``on_wait`` is called once if another process holds it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(lock, fcntl.LOCK_EX)
            for path in self.leftovers():
                shutil.rmtree(path, ignore_errors=True)
            yield

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Path]:
        """An empty folder inside the cache that is gone afterwards. Needs the lock."""
        path = Path(tempfile.mkdtemp(prefix=_TEMP_PREFIX, dir=self.root))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def committing(self, name: str, recipe: dict) -> Iterator[Path]:
        """An empty folder that becomes ``name`` when the block ends without an exception.

        After an exception nothing of it is left, and an older ``name`` is untouched.
        """
        with self.temporary() as temporary:
            content = temporary / "new"
            content.mkdir()
            yield content
            (content / _MARKER).write_text(json.dumps(recipe, indent=2, sort_keys=True) + "\n")
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():  # made by an older recipe
                target.rename(temporary / "old")
            content.rename(target)
