"""Folders of tiny VLMs with processor and samples, created once per process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from examples.vlm.kinds import KINDS
from examples.vlm.tiny import make

SAMPLES = 12


@functools.cache
def tiny(kind: str) -> tuple[str, str]:
    """Return the folder of the model and the file of the samples, which must not be changed."""
    place = tempfile.TemporaryDirectory(prefix=f"tiny-{kind}-")
    _KEPT.append(place)
    folder, data = make(kind, Path(place.name), SAMPLES)
    return str(folder), str(data)


_KEPT: list[tempfile.TemporaryDirectory] = []


def modalities(kind: str) -> dict:
    """Return the modalities for the section ``data``."""
    if KINDS[kind].sound:
        return {"audio": {"column": "audio"}}
    return {"image": {"column": "images"}}
