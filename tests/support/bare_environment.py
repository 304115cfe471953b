"""Interpreter with only torch, transformers, triton, numpy and their requirements.

It has no Ray, no OR-tools, and no numba.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import re
import sys
from pathlib import Path

from packaging.requirements import Requirement

PACKAGES = ("torch", "transformers", "triton", "numpy")


def required(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """Return installed distributions of these names and of their requirements, without extras."""
    found: dict[str, metadata.Distribution] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # required on other systems only
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
    """Return the interpreter's command and its environment.

    Args:
        folder: empty folder for links to the packages.
    """
    for distribution in required(PACKAGES).values():
        for top in {path.parts[0] for path in distribution.files or ()}:
            source = Path(str(distribution.locate_file(top)))
            link = folder / top  # several distributions share the folder nvidia
            if top not in ("..", "__pycache__") and source.exists() and not link.exists():
                link.symlink_to(source)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return [sys.executable, "-S"], {**environment, "PYTHONPATH": str(folder)}
