"""Conversion of a media file to the tensors of one item."""

import importlib
import io
import json
from collections.abc import Callable
from contextlib import nullcontext
from math import gcd
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch

from raymm.actors.weights.custom_code import custom_code, why_not_loaded
from raymm.actors.weights.hub_folder import local_folder
from raymm.data.remote.urls import is_url
from raymm.data.samples.headers import AUDIO, IMAGE, VIDEO, check_whole, kind_of
from raymm.data.samples.limits import Limits
from raymm.data.samples.media import MediaBytes, MediaRange, open_media, read_media
from raymm.data.samples.pixels import to_rgb
from raymm.data.samples.whole_sounds import WholeSounds
from raymm.data.video.frames import Clip, FrameLimits, FrameSampling, read_clip
from raymm.data.video.sound import read_track
from raymm.errors import USER_CODE_RAISES, ConfigError, DataError
from raymm.packages import explained_imports

# Function from one item (or a list of its frames) to its tensors.
Processor = Callable[[Any], dict[str, torch.Tensor]]
File = str | Path | BinaryIO


def processor_input(media: str | MediaBytes | MediaRange, kind: str) -> Any:
    """Return the argument of a processor function for an item, see ``ModalityDataConfig.input``."""
    if kind == "file":
        local = isinstance(media, str) and not is_url(media)
        return media if local else io.BytesIO(read_media(media))
    if kind == "bytes":
        return read_media(media)
    with open_media(media) as file:
        return read_image(file)


def read_video(
    media: str | MediaBytes | MediaRange, sampling: FrameSampling, limits: Limits
) -> Clip:
    """Decode the selected frames of a video file; errors are those of
    :func:`raymm.data.video.frames.read_clip`, or an ``OSError``."""
    frame_limits = FrameLimits(
        limits.max_image_pixels, limits.max_video_seconds, limits.max_video_frames
    )
    with open_media(media) as file:
        return read_clip(file, sampling, frame_limits)


def load_processor(
    name: str, field: str = "processor", trust_remote_code: bool = False
) -> Processor:
    """Load the function of ``ModalityDataConfig.processor``. Raise a ``DataError`` if the function
    cannot be imported, or the folder has no processor.

    Args:
        name: ``"pkg.mod:fn"``, or the folder or hub id of a Hugging Face image processor, feature
            extractor, or processor of both, chosen by the kind of the item. Folders receive RGB
            images (transparency over white, EXIF rotation applied; lists of images if items are
            made of frames) or mono sound resampled to the rate of the extractor.
        field: name of the configuration field, for errors.
        trust_remote_code: run Python files of the folder, if it names any.

    Returns:
        The function. For a folder, it raises a SampleError for a sound that the extractor would
        truncate.
    """
    try:
        folder = Path(local_folder(name, weights=False))
    except ConfigError as error:
        raise DataError(f"{field}: {error}") from None
    if folder.is_dir():
        return _folder_processor(folder, field, trust_remote_code)
    module, separator, function = name.partition(":")
    if not separator or not module or not function:
        raise DataError(
            f"{field}: {name!r} is neither 'package.module:function' nor an existing folder"
        )
    try:
        loaded = getattr(importlib.import_module(module), function)
    except USER_CODE_RAISES as error:  # the module is a program: it may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{field}: cannot import {name!r}: {reason}") from error
    if not callable(loaded):
        raise DataError(f"{field}: {name!r} is not a function")
    return cast(Processor, loaded)


def read_image(path: File):
    """Read an RGB ``PIL.Image`` from a path or binary file, converted by
    :func:`raymm.data.samples.pixels.to_rgb`. Raise a ``ValueError`` for more pixels than
    ``PIL.Image.MAX_IMAGE_PIXELS`` (set to ``data.max_image_pixels`` while a step is built),
    PostScript, or an unsupported pixel format."""
    from PIL import Image

    with Image.open(path) as image:
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and image.width * image.height > limit:
            raise ValueError(f"{image.width} x {image.height} pixels, above {limit:,}")
        if image.format == "EPS":
            raise ValueError("PostScript is a program, not a picture")
        return to_rgb(image)


def read_audio(path: File, rate: int) -> np.ndarray:
    """Read mono sound from a sound or video file: (samples,) float32 at ``rate`` Hz. Integers are
    scaled to [-1, 1); floats are unchanged. Raise a ``ValueError`` if there is no sound, or less
    than the header announces, or if a sample is not finite."""
    from scipy.signal import resample_poly

    source_rate, sound = _sound(path)
    if not np.isfinite(sound).all():
        wrong = np.argwhere(~np.isfinite(sound))
        frame, channel = (int(index) for index in wrong[0])
        raise ValueError(
            f"{len(wrong):,} of {sound.size:,} samples are not finite, the first "
            f"({sound[frame, channel]}) in frame {frame:,}"
        )
    mono = sound.mean(axis=1)
    if not len(mono):
        raise ValueError("the file holds no sound")
    if source_rate == rate:
        return mono
    common = gcd(source_rate, rate)
    return resample_poly(mono, rate // common, source_rate // common).astype(np.float32)


def _sound(path: File) -> tuple[int, np.ndarray]:
    """Return Hz, and (frames, channels) float32."""
    import soundfile

    if kind_of(path) == VIDEO:
        with open(path, "rb") if isinstance(path, str | Path) else nullcontext(path) as file:
            return read_track(file)
    with soundfile.SoundFile(path) as file:
        check_whole(file)
        rate, frames = file.samplerate, file.frames
        sound = file.read(dtype="float32", always_2d=True)
    if len(sound) < frames:
        raise ValueError(f"the file ends after {len(sound):,} of {frames:,} frames: it is cut off")
    return rate, sound


def _folder_processor(folder: Path, field: str, trust_remote_code: bool) -> Processor:
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    kinds = _kinds_in(folder, field)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        with explained_imports(f"{field}: the processor of {str(folder)!r}"):
            images: Any = IMAGE in kinds and AutoImageProcessor.from_pretrained(folder, **options)
            sounds: Any = AUDIO in kinds and AutoFeatureExtractor.from_pretrained(folder, **options)
    except ConfigError:
        raise
    except USER_CODE_RAISES as error:  # a folder may hold anything
        kinds_of_code = set(custom_code(folder)) & {"AutoImageProcessor", "AutoFeatureExtractor"}
        if kinds_of_code and not trust_remote_code:
            why = why_not_loaded(folder, sorted(kinds_of_code)[0], error)
            raise DataError(f"{field}: {why}") from None
        raise DataError(f"{field}: cannot load {str(folder)!r}: {error}") from error

    def extract(sound: np.ndarray) -> Any:
        return sounds(sound, sampling_rate=sounds.sampling_rate, return_tensors="pt")

    sound_check = WholeSounds(sounds.sampling_rate if sounds else 0)

    def process(item: File | list | Clip) -> dict[str, torch.Tensor]:
        if isinstance(item, list | Clip):
            if not images:
                raise ValueError(f"frames need an image processor; {folder} has none")
            return dict(images(images=frames_of(item), return_tensors="pt"))
        kind = next(iter(kinds)) if len(kinds) == 1 else kind_of(item)
        if kind in (AUDIO, VIDEO) and sounds:
            sound = read_audio(item, sounds.sampling_rate)
            sound_check.check(sound, extract)
            tensors = extract(sound)
        else:
            tensors = images(images=read_image(item), return_tensors="pt")
        return {key: _only_item(key, value) for key, value in tensors.items()}

    return process


def frames_of(item: list | Clip) -> list:
    """Return every frame of a video, or file of a frame, as a ``PIL.Image``."""
    from PIL import Image

    if isinstance(item, Clip):
        return [Image.fromarray(frame) for frame in item.frames]
    return [read_image(frame) for frame in item]


def _kinds_in(folder: Path, field: str) -> set[str]:
    """Return the kinds that a folder has a processor for, by the files that ``save_pretrained``
    writes."""
    single, combined = folder / "preprocessor_config.json", folder / "processor_config.json"
    kinds = set()
    try:
        if single.is_file():
            config = json.loads(single.read_text())
            kinds.add(AUDIO if "feature_extractor_type" in config else IMAGE)
        if combined.is_file():
            config = json.loads(combined.read_text())
            kinds |= {IMAGE} if config.get("image_processor") else set()
            kinds |= {AUDIO} if config.get("feature_extractor") else set()
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{field}: cannot load {str(folder)!r}: {error}") from error
    if not kinds:
        raise DataError(
            f"{field}: {str(folder)!r} has no preprocessor_config.json and no "
            "processor_config.json with an image processor or feature extractor"
        )
    return kinds


def _only_item(key: str, value: Any) -> torch.Tensor:
    value = torch.as_tensor(value)
    if value.shape[0] != 1:
        raise ValueError(
            f"the processor returned {key!r} of shape {tuple(value.shape)} for one item; "
            "for a varying number of patches, give a processor function instead of a folder"
        )
    return value[0]
