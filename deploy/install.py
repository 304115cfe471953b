"""``pip install`` with one line of progress:

    python -m deploy.install WHAT --constraint constraints.txt --editable '.[dev]'

WHAT names the installation in that line. On a terminal the line is rewritten every second;
elsewhere a line is printed every 20 seconds. What pip prints is shown only if it fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_COLLECTED = re.compile(r"Collecting (\S+)")
_FETCHED = re.compile(
    r"\s*(?:Downloading|Using cached|Processing) (?:\S*/)?([\w.]+-[\w.]+)-\S+\.whl( \([^)]*\))?"
)
_ALL_COLLECTED = re.compile(r"Installing collected packages: (.*)")
_TERMINAL_SECONDS, _LOG_SECONDS = 1, 20


def main(arguments: Sequence[str]) -> int:
    """Run pip; return its exit code."""
    what, *options = arguments
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", "--no-input"]
    progress = _Progress(what)
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        printer = threading.Thread(target=progress.print_until_done, daemon=True)
        printer.start()
        lines = []
        for line in pip.stdout or ():
            lines.append(line)
            progress.read(line)
        code = pip.wait()
    progress.done.set()
    printer.join()
    if code:
        print("".join(lines), end="", file=sys.stderr)
    progress.print(f"{what}: failed" if code else f"{what}: done", last=True)
    return code


class _Progress:
    """State of an installation, read from pip's output.

    Args:
        what: the installation, as lines begin.
    """

    def __init__(self, what: str) -> None:
        self.done = threading.Event()
        self._what, self._state, self._packages = what, "asking pip", 0
        self._before: int | None = None  # packages installed before pip unpacks the first one
        self._start, self._terminal = time.monotonic(), sys.stdout.isatty()

    def read(self, line: str) -> None:
        """Update the state from a line of pip."""
        if match := _COLLECTED.match(line):
            self._packages += 1
            self._state = f"resolving {match[1]}"
        elif match := _FETCHED.match(line):
            self._state = f"fetching {match[1]}{match[2] or ''}"
        elif match := _ALL_COLLECTED.match(line):
            self._packages, self._before = len(match[1].split(", ")), _installed()

    def print_until_done(self) -> None:
        """Print the state at intervals."""
        interval = _TERMINAL_SECONDS if self._terminal else _LOG_SECONDS
        self.print(f"{self._what} (minutes, if several GB are fetched)")
        while not self.done.wait(interval):
            if self._before is None:
                self.print(f"{self._what}: package {self._packages}, {self._state}")
            else:
                unpacked = _installed() - self._before
                self.print(f"{self._what}: unpacked {unpacked} of {self._packages} packages")

    def print(self, text: str, last: bool = False) -> None:
        """Print a line, over the one before on a terminal."""
        text = f"{text}, {time.monotonic() - self._start:.0f} s"
        if self._terminal:
            print(f"\r\x1b[2K{text[:100]}", end="\n" if last else "", flush=True)
        else:
            print(text, flush=True)


def _installed() -> int:
    return len(list(Path(sysconfig.get_path("purelib")).glob("*.dist-info")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
