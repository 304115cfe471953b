"""An interpreter that has torch, transformers, triton, numpy and what these require: no Ray, no
OR-tools, no numba."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import re
import sys
from pathlib import Path

from packaging.requirements import Requirement

PACKAGES = ("torch", "transformers", "triton", "numpy")


def required(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """Installed distributions of these names and of all that they require, without extras."""
    found: dict[str, metadata.Distribution] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # what only other systems need
            continue
        if key not in found:
            found[key] = distribution
            requirements = map(Requirement, distribution.requires or ())
            pending += [
                one.name for one in requirements
                if one.marker is None or one.marker.evaluate({"extra": ""})
            ]
    return found


def bare_command(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The interpreter's command and its environment.

    Args:
        folder: empty; gets links to the packages.
    """
    for distribution in required(PACKAGES).values():
        for top in {path.parts[0] for path in distribution.files or ()}:
            source = Path(str(distribution.locate_file(top)))
            link = folder / top  # several distributions share the folder nvidia
            if top not in ("..", "__pycache__") and source.exists() and not link.exists():
                link.symlink_to(source)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return [sys.executable, "-S"], {**environment, "PYTHONPATH": str(folder)}
