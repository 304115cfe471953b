"""Tensor-core products and waits of the large attention kernels by version of Triton.

This is the table in ``docs/gpus.md``, for all supported versions. Each version is installed into a
separate folder, where it replaces the installed one, and compiles for sm_90 without a GPU. A
version takes about 170 MB of download and a minute of CPU.

    python tests/kernels/triton_versions.py             # prints the table
    python tests/kernels/triton_versions.py --record    # writes it into the page
    python tests/kernels/triton_versions.py --only 3.6.0
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpus.md"
# Newest release of each minor version that `pyproject.toml` accepts.
VERSIONS = ("3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")
Counts = Mapping[str, tuple[int, int, int]]
"""Kernel -> products of full tiles, waits for them, bytes spilled."""


def counts_with(version: str, folder: str) -> Counts:
    """Install a version into an empty folder, and count in its compiled kernels.

    Raises:
        subprocess.CalledProcessError: the installation or the compilation failed.
    """
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    subprocess.run([*install, f"triton=={version}"], check=True)
    command = [sys.executable, str(Path(__file__).with_name("machine_code.py")), "--counts"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((folder, str(ROOT)))}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    if found.pop("triton") != version:
        raise RuntimeError(f"the kernels were not compiled by triton {version}")
    return {name: (products, waits, spills) for name, (products, waits, spills) in found.items()}


def table(found: Mapping[str, Counts]) -> list[str]:
    """Return the table as lines of Markdown, from counts by version."""
    names = next(iter(found.values()))
    return [
        f"| kernel and head dim | {' | '.join(found)} |",
        f"| --- |{' --- |' * len(found)}",
        *(
            f"| {name} | "
            + " | ".join(
                f"{waits} of {products}" + f" ({spills} B)" * (spills > 0)
                for products, waits, spills in (counts[name] for counts in found.values())
            )
            + " |"
            for name in names
        ),
    ]


def read_table(text: str) -> dict[str, dict[str, tuple[int, int, int]]]:
    """Return a page's table: products, waits and spilled bytes by version and kernel."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| kernel and head dim |"))
    _, *versions = _cells(lines[start])
    found: dict[str, dict[str, tuple[int, int, int]]] = {version: {} for version in versions}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = _cells(line)
        for version, cell in zip(versions, cells, strict=True):
            waits, products, *spills = map(int, re.findall(r"\d+", cell))
            found[version][name] = products, waits, sum(spills)
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def record(lines: list[str]) -> None:
    """Replace the page's table."""
    text = PAGE.read_text().splitlines()
    start = next(i for i, line in enumerate(text) if line.startswith("| kernel and head dim |"))
    stop = next((i for i in range(start, len(text)) if not text[i].startswith("|")), len(text))
    PAGE.write_text("\n".join([*text[:start], *lines, *text[stop:]]) + "\n")


def main() -> None:
    """Print or record the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the page")
    parser.add_argument("--only", nargs="+", choices=VERSIONS, default=VERSIONS)
    options = parser.parse_args()
    found = {}
    for version in options.only:
        with tempfile.TemporaryDirectory(prefix="triton-") as folder:
            found[version] = counts_with(version, folder)
    lines = table(found)
    print("\n".join(lines))
    if options.record:
        record(lines)


if __name__ == "__main__":
    main()
