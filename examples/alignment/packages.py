"""Pinned packages: download with apt or pip, check size and SHA-256, unpack.

Packages are only unpacked, never installed, and nothing of them is imported or run.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from examples.alignment.cache import Cache

_POLL_INTERVAL = 0.2  # s, between looks at how much has arrived
_NETWORK_TIMEOUT = 30  # s without a byte before apt or pip gives an attempt up
_NETWORK_RETRIES = 2
_ERROR_LINES = 6  # of apt's or pip's output, in an error

OnBytes = Callable[[int], None]  # called with the bytes received so far


class DownloadError(RuntimeError):
    """A package could not be downloaded, or is not the pinned one. The message says what to do."""


@dataclass(frozen=True)
class Package:
    """One file of a Debian archive or of PyPI."""

    kind: Literal["deb", "wheel"]
    name: str
    version: str
    sha256: str
    size: int  # bytes

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def archive(self) -> str:
        """File name in the cache's ``downloads`` folder."""
        return f"{self.name}-{self.version}.{'deb' if self.kind == 'deb' else 'whl'}"


Fetch = Callable[[Package, Path, OnBytes], None]
"""Puts the package's one archive, and no other file, into an empty folder."""


def fetch(package: Package, folder: Path, on_bytes: OnBytes) -> None:
    """Download ``package`` into ``folder`` by apt or pip. Raises ``DownloadError``."""
    (_fetch_deb if package.kind == "deb" else _fetch_wheel)(package, folder, on_bytes)


def obtain(cache: Cache, package: Package, fetch: Fetch, on_bytes: OnBytes) -> Path:
    """The package's verified archive in the cache, downloaded if it is not there yet.

    Raises ``DownloadError``, and then the cache has nothing of the package.
    """
    path = cache.root / "downloads" / package.archive
    if path.exists() and _sha256(path) == package.sha256:
        on_bytes(package.size)
        return path
    with cache.temporary() as temporary:
        folder = temporary / "archive"
        folder.mkdir()
        fetch(package, folder, on_bytes)
        files = [file for file in folder.iterdir() if file.is_file()]
        if len(files) != 1:
            raise DownloadError(
                f"{package}: the download gave {len(files)} files "
                f"({', '.join(sorted(file.name for file in files)) or 'none'}), expected one"
            )
        found = _sha256(files[0])
        if found != package.sha256:
            raise DownloadError(
                f"{package}: the downloaded {files[0].name} ({files[0].stat().st_size} bytes) has "
                f"sha256 {found}, expected {package.sha256} ({package.size} bytes); "
                "it is damaged or not the pinned file, and was thrown away"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        files[0].replace(path)
    return path


def unpack(package: Package, archive: Path, folder: Path) -> None:
    """Unpack a verified archive into ``folder``; nothing in it is executed."""
    if package.kind == "wheel":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)
        return
    result = subprocess.run(
        ["dpkg-deb", "-x", archive, folder], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise DownloadError(f"{package}: dpkg-deb cannot unpack {archive}: {result.stderr.strip()}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_deb(package: Package, folder: Path, on_bytes: OnBytes) -> None:
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise DownloadError(
            f"{package} is a Debian package, and this machine has no {' and no '.join(missing)}; "
            "the PyPI-only variant does not need it: make train DATA=easy-vqa"
        )
    apt = ["apt-get", "-q", "-o", f"Acquire::Retries={_NETWORK_RETRIES}"]
    apt += ["-o", f"Acquire::http::Timeout={_NETWORK_TIMEOUT}"]
    download = ["download", f"{package.name}={package.version}"]
    code, output = _run_watched([*apt, *download], folder, on_bytes)
    if code:  # the package lists are missing or old: fetch our own, no root needed
        state = folder.parent / "apt"
        for path in ("lists/partial", "cache/archives/partial"):
            (state / path).mkdir(parents=True, exist_ok=True)
        apt += ["-o", f"Dir::State::lists={state}/lists", "-o", f"Dir::Cache={state}/cache"]
        update_code, update_output = _run_watched([*apt, "update"], folder, lambda _: None)
        code, output = _run_watched([*apt, *download], folder, on_bytes)
        output = f"{update_output}\n{output}" if update_code else output
    if code:
        raise DownloadError(
            f"apt-get cannot download {package} (exit status {code}):\n{_last_lines(output)}\n"
            "Check the network and that apt's sources have this version (Debian 12's main has), "
            "or use the PyPI-only variant: make train DATA=easy-vqa"
        )


def _fetch_wheel(package: Package, folder: Path, on_bytes: OnBytes) -> None:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(f"{package}: {sys.executable} has no pip (python -m ensurepip adds it)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--timeout", str(_NETWORK_TIMEOUT), "--retries", str(_NETWORK_RETRIES)]
    command += ["--dest", str(folder), f"{package.name}=={package.version}"]
    code, output = _run_watched(command, folder, on_bytes)
    if code:
        raise DownloadError(
            f"pip cannot download {package} (exit status {code}):\n{_last_lines(output)}\n"
            "Check the network, and pip's index-url and proxy settings"
        )


def _run_watched(command: list[str], folder: Path, on_bytes: OnBytes) -> tuple[int, str]:
    """Run ``command`` in ``folder``: exit status and output.

    ``on_bytes`` sees how much lies in ``folder`` and its sibling ``scratch``, which is the
    command's TMPDIR, so that a killed download leaves nothing outside the cache.
    """
    scratch = folder.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    log = folder.parent / "log"
    environment = {**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        try:
            while process.poll() is None:
                on_bytes(_folder_size(folder) + _folder_size(scratch))
                time.sleep(_POLL_INTERVAL)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return process.returncode, log.read_text(errors="replace")


def _folder_size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # renamed meanwhile
                continue
    return total


def _last_lines(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return "\n".join(f"  {line}" for line in lines[-_ERROR_LINES:])
