"""Folders of tiny whole models with processor and samples, made once per process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
from transformers.utils.import_utils import is_torchvision_available

from examples.vlm.kinds import KINDS
from examples.vlm.tiny import make

# Processors that transformers makes of pictures without torchvision, or of sound.
WITHOUT_TORCHVISION = ("gemma3", "idefics3", "qwen2_audio")
SAMPLES = 12


def kinds() -> list:
    """Every kind, as parameters; without torchvision most are skipped."""
    missing = pytest.mark.skipif(
        not is_torchvision_available(), reason="the processor needs torchvision"
    )
    return [
        pytest.param(kind, marks=() if kind in WITHOUT_TORCHVISION else missing)
        for kind in KINDS if kind != "smolvlm"  # needs num2words besides
    ]


@functools.cache
def tiny(kind: str) -> tuple[str, str]:
    """Folder of the model and file of the samples; not to be changed."""
    place = tempfile.TemporaryDirectory(prefix=f"tiny-{kind}-")
    _KEPT.append(place)
    folder, data = make(kind, Path(place.name), SAMPLES)
    return str(folder), str(data)


_KEPT: list[tempfile.TemporaryDirectory] = []


def modalities(kind: str) -> dict:
    """Of ``data``."""
    if KINDS[kind].sound:
        return {"audio": {"column": "audio"}}
    return {"image": {"column": "images"}}
