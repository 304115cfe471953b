"""File system of a few megabytes for tests that fill it."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """tmpfs, mounted at a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Write until no byte is free."""
        with open(self._filler, "ab", buffering=0) as file:
            for size in (2**16, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        assert not os.statvfs(self.path).f_bavail

    def empty(self) -> None:
        """Free the space that :meth:`fill` has taken."""
        self._filler.unlink()

    def set_writable(self, writable: bool) -> None:
        """Mount it again, read-only or not."""
        option = f"remount,{'rw' if writable else 'ro'}"
        subprocess.run(["mount", "-o", option, self.path], check=True)


@contextlib.contextmanager
def mounted(path: Path, size: str) -> Iterator[SmallDisk]:
    """Mount a tmpfs; skip the test if this process may not."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount(8)")
    if result.returncode:
        pytest.skip(f"cannot mount a tmpfs: {result.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@pytest.fixture
def small_disk(tmp_path):
    """Return a disk of 4 MiB."""
    with mounted(tmp_path / "disk", "4m") as disk:
        yield disk
