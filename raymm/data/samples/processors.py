"""Conversion of a media file to the tensors of one item."""

from __future__ import annotations

import importlib
import io
import json
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import torch

from raymm.actors.weights.custom_code import custom_code, why_not_loaded
from raymm.actors.weights.hub_folder import local_folder
from raymm.data.remote.urls import is_url
from raymm.data.samples.headers import AUDIO, IMAGE, VIDEO, Limits, check_whole, kind_of
from raymm.data.samples.media import MediaBytes, MediaRange, open_media, read_media
from raymm.data.video.container import opened, seconds_of, sound_of
from raymm.data.video.frames import Clip, FrameLimits, FrameSampling, read_clip
from raymm.errors import USER_CODE_RAISES, ConfigError, DataError, SampleError
from raymm.packages import explained_imports

# Limit on the frames that FFmpeg may decode to detect stream parameters; no frame is used here.
_PIXELS = 2**26
# A track may be this many seconds shorter than announced: codecs add padding before the first
# sample, and end with a complete frame.
_SHORT_S = 0.5
# Seconds of noise that replace the beginning of a sound, or are appended to it.
_NOISE_S = 0.1
# Seconds at the end of a sound that may be less than a frame of the extractor.
_FRAME_S = 0.02

Extract = Callable[[np.ndarray], Mapping[str, Any]]
Features = dict[str, torch.Tensor]
# Function from one item (or a list of its frames) to its tensors.
Processor = Callable[[Any], dict[str, torch.Tensor]]
File = str | Path | BinaryIO
_WHITE_IS_ZERO = 0  # TIFF's PhotometricInterpretation, which Pillow leaves at 16 bits
_PHOTOMETRIC = 262


def read_track(file: BinaryIO) -> tuple[int, np.ndarray]:
    """Decode the sound track of a file whose header has been checked against the limits; return
    (Hz, (samples, channels) float32). Raise a ``SampleError`` if the file has no sound track, ends
    before its announced duration, or cannot be decoded."""
    import av

    with opened(file, _PIXELS) as container:
        stream = sound_of(container)
        if stream is None:
            raise SampleError("the file has no sound track")
        rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels
        if not rate or not channels:
            raise SampleError(f"its sound track has {channels} channels at {rate} Hz")
        announced = round(float(seconds_of(container, stream)) * rate)
        # Codecs return different sample formats; this converts all of them, at unchanged channels
        # and rate.
        resampler = av.AudioResampler(format="fltp", layout=stream.codec_context.layout, rate=rate)
        chunks: list[np.ndarray] = []
        count = 0
        for frame in container.decode(stream):
            for converted in resampler.resample(frame):
                chunks.append(_samples(converted))
                count += chunks[-1].shape[1]
                if count > announced + rate:
                    raise SampleError(
                        f"its sound track is longer than the {announced / rate:.2f} s that it "
                        "announces"
                    )
        chunks += [_samples(converted) for converted in resampler.resample(None)]
    if not count:
        raise SampleError("the file holds no sound")
    if count < announced - _SHORT_S * rate:
        raise SampleError(
            f"its sound track is cut off: it announces {announced / rate:.2f} s and has "
            f"{count / rate:.2f}"
        )
    return rate, np.concatenate(chunks, axis=1).T


def _samples(frame: Any) -> np.ndarray:
    return frame.to_ndarray()


if TYPE_CHECKING:
    from PIL import Image


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to upright 8-bit RGB, as ``load_image`` of Hugging Face.

    The EXIF orientation is applied, transparent pixels become white, and the first frame or page is
    used. Grey of 10 to 16 bits is scaled by the white level of its format; Pillow would clip it at
    255. Colours of 16 bits lose the lower 8 bits. Raise a ``ValueError`` for 32-bit integers,
    signed integers or floats, whose white level is unknown, and for a transparent 16-bit colour.
    """
    from PIL import ImageOps

    grey = _Grey.of(image)
    clear = _transparent_colour(image)
    if image.format == "GIF" or getattr(image, "is_animated", False):
        image.seek(0)
    if grey is not None:
        return grey.to_rgb(ImageOps.exif_transpose(image), clear)
    if clear is not None:
        image.info["transparency"] = clear
    image = ImageOps.exif_transpose(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    return _over_white(image.convert("RGBA"))


def _over_white(image: Image.Image) -> Image.Image:
    from PIL import Image

    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


class _Grey:
    """Grey levels of more than 8 bits.

    Args:
        white: level of white; of black if ``inverted``.
        inverted: level 0 is white.
    """

    def __init__(self, white: int, inverted: bool) -> None:
        self.white, self.inverted = white, inverted

    @classmethod
    def of(cls, image: Image.Image) -> _Grey | None:
        """Return the grey levels of an image; None for 8 or fewer bits per channel."""
        if not image.mode.startswith(("I", "F")):
            return None
        stored = _raw_mode(image)
        # Pillow scales the pixels of PGM and JPEG 2000 to 16 bits.
        scaled = image.format == "PPM" or image.format == "JPEG2000"
        bits = re.fullmatch(r"I;(\d+)[BLNR]?", stored)
        if image.mode.startswith("F") or not (bits or scaled) or (bits and int(bits[1]) > 16):
            raise ValueError(
                f"its mode is {image.mode!r}, stored as {stored!r}, which does not define a value "
                "for white; accepted: up to 16 bits per channel, unsigned, or a processor function "
                "that reads the file"
            )
        tags = getattr(image, "tag_v2", {})
        inverted = tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
        return cls(2 ** (int(bits[1]) if bits and not scaled else 16) - 1, inverted)

    def to_rgb(self, image: Image.Image, clear: int | None) -> Image.Image:
        from PIL import Image

        levels = np.asarray(image).astype(np.int64)
        grey = (levels * 255 + self.white // 2) // self.white
        if self.inverted:
            grey = 255 - grey
        if clear is not None:
            grey[levels == clear] = 255  # over white
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")


def _raw_mode(image: Image.Image) -> str:
    """Return the storage format of the pixels, as named by Pillow's decoders."""
    for tile in getattr(image, "tile", ()):
        arguments = tile.args if isinstance(tile.args, tuple) else (tile.args,)
        if arguments and isinstance(arguments[0], str):
            return arguments[0]
    return image.mode


def _transparent_colour(image: Image.Image) -> int | None:
    """Return the transparent grey level of a PNG at the scale of the decoded levels. Raise a
    ``ValueError`` for a 16-bit colour, because only 8 of its bits are decoded."""
    clear = image.info.get("transparency")
    bits = re.fullmatch(r"(?:L|RGB);(\d+)B?", _raw_mode(image))
    if isinstance(clear, tuple) and bits and int(bits[1]) > 8:
        raise ValueError(
            f"its colours have {bits[1]} bits and one of them, {clear}, is transparent; accepted: "
            "an alpha channel"
        )
    if not isinstance(clear, int) or image.mode not in ("L", "I;16"):
        return None
    if image.mode == "L" and bits:
        return clear * 255 // (2 ** int(bits[1]) - 1)
    return clear


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
    :func:`raymm.data.samples.processors.to_rgb`. Raise a ``ValueError`` for more pixels than
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


class WholeSounds:
    """Check of the sounds of one extractor, with ``rate`` samples per second. Only sounds that are
    longer than all accepted ones are checked."""

    def __init__(self, rate: int) -> None:
        self._rate, self._longest = rate, 0

    def check(self, sound: np.ndarray, extract: Extract) -> None:
        """Raise a ``SampleError`` for a sound, (samples,) float32, that is not used completely.
        ``extract`` returns all tensors for a sound."""
        if len(sound) <= self._longest:
            return
        noise = np.random.default_rng(0).standard_normal(int(_NOISE_S * self._rate))
        noise = (noise * (float(np.abs(sound).max()) or 1.0)).astype(sound.dtype)
        features, length = _extracted(sound, extract), f"{len(sound) / self._rate:.2f} s"
        if len(sound) > len(noise) and equal_tensors(
            features, _extracted(np.concatenate([noise, sound[len(noise) :]]), extract)
        ):
            raise SampleError(
                f"the sound is {length} long, and the processor crops its beginning; split the "
                "sound into several items or rows"
            )
        used = len(sound) if self._is_open(sound, noise, features, extract) else self._taken(
            sound, features, extract
        )
        if len(sound) - used > _FRAME_S * self._rate:
            most = f"{used / self._rate:.2f} s"
            raise SampleError(
                f"the sound is {length} long, but the processor uses only its first {most}; "
                f"accepted: sounds of up to {most}. Split the sound into several items or rows"
            )
        self._longest = len(sound)

    def _is_open(
        self, sound: np.ndarray, noise: np.ndarray, features: Features, extract: Extract
    ) -> bool:
        """Return True if a longer sound has other features, or is refused by the extractor."""
        try:
            longer_features = _extracted(np.concatenate([sound, noise]), extract)
        except USER_CODE_RAISES:
            return True
        return not equal_tensors(features, longer_features)

    def _taken(self, sound: np.ndarray, features: Features, extract: Extract) -> int:
        """Return the number of first samples that have the same features as the entire sound."""
        least, most = 0, len(sound)
        while most - least > _FRAME_S * self._rate / 4:
            middle = (least + most) // 2
            if equal_tensors(features, _extracted(sound[:middle], extract)):
                most = middle
            else:
                least = middle
        return most


def _extracted(sound: np.ndarray, extract: Extract) -> Features:
    """Return features with fixed random numbers, because some extractors add noise or crop
    randomly."""
    state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            np.random.seed(0)
            return {name: torch.as_tensor(value) for name, value in extract(sound).items()}
    finally:
        np.random.set_state(state)


def equal_tensors(left: Features, right: Features) -> bool:
    """Return True if two results of a processor have equal tensors."""
    return left.keys() == right.keys() and all(
        torch.equal(value, right[name]) for name, value in left.items()
    )
