"""From a media file to the tensors of one item."""

import importlib
import json
from collections.abc import Callable
from math import gcd
from pathlib import Path

import numpy as np
import torch

from raymm.data.errors import DataError

Processor = Callable[[str], dict[str, torch.Tensor]]


def load_processor(name: str, field: str = "processor") -> Processor:
    """The function behind ``ModalityDataConfig.processor``.

    Args:
        name: ``"pkg.mod:fn"`` or a local folder of a Hugging Face image processor or feature
            extractor. Folders get RGB images (transparency over white, EXIF rotation applied)
            or mono sound resampled to the extractor's rate.
        field: name of the configuration field, for errors.

    Raises:
        DataError: it cannot be imported or is not such a folder.
    """
    if Path(name).is_dir():
        return _folder_processor(Path(name), field)
    module, separator, function = name.partition(":")
    if not separator or not module or not function:
        raise DataError(
            f"{field}: {name!r} is neither 'package.module:function' nor an existing folder"
        )
    try:
        loaded = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise DataError(f"{field}: cannot import {name!r}: {error}") from error
    if not callable(loaded):
        raise DataError(f"{field}: {name!r} is not a function")
    return loaded


def read_image(path: str):
    """An RGB ``PIL.Image`` of a file, upright, transparent pixels over white."""
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            return Image.alpha_composite(white, image).convert("RGB")
        return image.convert("RGB")


def read_audio(path: str, rate: int) -> np.ndarray:
    """(samples,) float32 mono sound of a file in [-1, 1], resampled to ``rate`` Hz."""
    import soundfile
    from scipy.signal import resample_poly

    sound, source_rate = soundfile.read(path, dtype="float32", always_2d=True)
    mono = sound.mean(axis=1)
    if not len(mono):
        raise ValueError("the file holds no sound")
    if source_rate == rate:
        return mono
    common = gcd(source_rate, rate)
    return resample_poly(mono, rate // common, source_rate // common).astype(np.float32)


def _folder_processor(folder: Path, field: str) -> Processor:
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    file = folder / "preprocessor_config.json"
    if not file.is_file():
        raise DataError(f"{field}: {str(folder)!r} has no preprocessor_config.json")
    try:
        is_audio = "feature_extractor_type" in json.loads(file.read_text())
        kind = AutoFeatureExtractor if is_audio else AutoImageProcessor
        processor = kind.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{field}: cannot load {str(folder)!r}: {error}") from error

    def process(path: str) -> dict[str, torch.Tensor]:
        if is_audio:
            rate = processor.sampling_rate
            item = processor(read_audio(path, rate), sampling_rate=rate, return_tensors="pt")
        else:
            item = processor(images=read_image(path), return_tensors="pt")
        return {key: _only_item(key, value) for key, value in item.items()}

    return process


def _only_item(key: str, value: torch.Tensor) -> torch.Tensor:
    if value.shape[0] != 1:
        raise ValueError(
            f"the processor returned {key!r} of shape {tuple(value.shape)} for one item; "
            "patches of varying number need a processor function of their own"
        )
    return value[0]
