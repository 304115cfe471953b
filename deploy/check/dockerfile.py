"""Check of a Dockerfile with ``hadolint``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def problems(file: Path) -> Iterator[str]:
    """Every finding, by line and rule."""
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [str(program), "--no-color", "--format", "tty", str(file)], capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    yield from (line.removeprefix(f"{file}:") for line in lines)
    if done.returncode and not lines:
        yield f"hadolint ended with {done.returncode}: {done.stderr.strip()}"
