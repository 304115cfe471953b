"""Reading of media headers: the kind of a file, and its size when decoded, compared with limits.

Nothing is decoded, and no allocation is larger than the file. A single-colour image of 200 million
pixels is a file of 200 kB, and an hour of silence in eight channels is a file of 1 MB, so the
header is checked instead of the size of the file.
"""

import math
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from raymm.data.samples.media import MediaBytes, MediaRange, media_size, open_media
from raymm.data.video.container import HEAD, check_pictures, format_of, read_header
from raymm.errors import ConfigError, DataError, SampleError
from raymm.packages import is_installed

# Hz. Existing sound formats end at 768 kHz; resampling filters grow with the rate.
MAX_SAMPLE_RATE = 768_000
# Hz. Sounds count as at least mono at this rate, because a sound at 1 Hz grows to this rate when
# resampled.
REFERENCE_RATE = 48_000
_HEAD = HEAD  # bytes that identify the format
_IMAGES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"II*\0", b"MM\0*",
           b"II+\0", b"MM\0+", b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51", b"P5", b"P6")
_SOUNDS = (b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2", b"caff", b".snd")
_PILLOW = threading.RLock()
# Lines in the log of libsndfile about truncated WAV, AIFF and AU files; W64; RF64.
_CUT_OFF = tuple(map(re.compile, (
    r"(?m)^\s*(?:data|SSND|Data Size)\s*: (?P<said>\d+) \(should be (?P<found>\d+)\)",
    r"(?m)^riff\s*: (?P<said>\d+) \(should be (?P<found>\d+)\)",
    r"frame count (?P<found>\d+) does not match value from 'ds64' chunk of (?P<said>\d+)",
)))
# Sizes from here on are placeholders of writers that cannot seek (ffmpeg, sox).
_UNKNOWN_SIZE = 0x7FFF0000


@dataclass(frozen=True)
class Limits:
    """Limits of one item, set by the fields of the same names in the section ``data``.

    Attributes:
        max_image_pixels: width times height. Default: Pillow's limit, 256 MiB as RGB.
        max_audio_samples: frames times channels, at least those of mono at 48 kHz. Default: 1 GiB
            as float32, 93 minutes of mono.
        max_item_bytes: stored size of the file, tar member or Parquet value.
        max_row_group_bytes: size in memory of the columns that are read of one Parquet row group.
        max_video_seconds, max_video_frames: duration and frames of a video file, by its header.
            Default: 4 hours and a million frames; each frame is also limited by
            ``max_image_pixels``.
        max_text_characters: all texts of one row together.
    """

    max_image_pixels: int = 89_478_485
    max_audio_samples: int = 2**28
    max_item_bytes: int = 2**29
    max_row_group_bytes: int = 2**30
    max_video_seconds: int = 4 * 3600
    max_video_frames: int = 1_000_000
    max_text_characters: int = 2**24


IMAGE, AUDIO, VIDEO, OTHER = "image", "audio", "video", "other"


@dataclass(frozen=True)
class Header:
    """Properties of an item that are known before decoding.

    Attributes:
        kind: ``"image"``, ``"audio"``, ``"video"``, or ``"other"`` if only the size in bytes is
            known.
        width, height: pixels of an image or of the frames of a video.
        frames, rate, channels: frames per channel, Hz and channels of a sound.
        seconds: duration of a video.
    """

    kind: str
    width: int = 0
    height: int = 0
    frames: int = 0
    rate: int = 0
    channels: int = 0
    seconds: float = 0.0


def check_media(
    media: str | MediaBytes | MediaRange, limits: Limits, pictures: bool = False
) -> Header:
    """Read the header of an item and check it against the limits. Raise a ``SampleError`` if the
    item does not exist, is empty or invalid, or exceeds a limit, which is named, and a
    ``DataError`` if a server does not return the item.

    Args:
        pictures: True to check the frames of a video file, False for its sound track.
    """
    try:
        size = media_size(media)
    except FileNotFoundError:
        raise SampleError("the file does not exist") from None
    except OSError as error:
        raise SampleError(f"cannot be read ({type(error).__name__}: {error})") from error
    if not size:
        raise SampleError("the file is empty")
    if size > limits.max_item_bytes:
        raise SampleError(
            f"it has {size:,} bytes, above data.max_item_bytes ({limits.max_item_bytes:,})"
        )
    try:
        with open_media(media) as file:
            header = _read(file, limits, pictures)
    except (DataError, ConfigError):
        raise
    except Exception as error:  # a decoder raises whatever its format library raises
        raise SampleError(f"cannot be read ({type(error).__name__}: {error})") from error
    _check(header, limits)
    return header


def kind_of(item: str | Path | BinaryIO) -> str:
    """Return the kind of a path or binary file by its first bytes; see :class:`Header`."""
    if isinstance(item, str | Path):
        with open(item, "rb") as file:
            return _kind(file.read(_HEAD))
    head = item.read(_HEAD)
    item.seek(0)
    return _kind(head)


def _kind(head: bytes) -> str:
    if head.startswith(_IMAGES) or head[4:12] in (b"ftypavif", b"ftypavis"):
        return IMAGE
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return IMAGE
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return AUDIO
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        return AUDIO
    if head.startswith(_SOUNDS):
        return AUDIO
    return VIDEO if format_of(head) else OTHER


def _read(file: BinaryIO, limits: Limits, pictures: bool) -> Header:
    head = file.read(_HEAD)
    file.seek(0)
    kind = _kind(head)
    if kind == IMAGE:
        webp = head[8:12] == b"WEBP"
        return Header(IMAGE, *(_webp_size(head) if webp else _image_size(file)))
    if kind == VIDEO or pictures:
        return _video(file, limits, pictures)
    return _sound(file) if kind == AUDIO else Header(OTHER)


def _video(file: BinaryIO, limits: Limits, pictures: bool) -> Header:
    if not pictures and not is_installed("av"):
        return Header(OTHER)  # a processor function may use another decoder
    header = read_header(file, limits.max_image_pixels)
    if pictures:
        check_pictures(
            header, limits.max_image_pixels, limits.max_video_seconds, limits.max_video_frames
        )
        return Header(VIDEO, header.width, header.height, seconds=header.seconds)
    if not header.channels:
        return Header(OTHER)
    frames = math.ceil(header.sound_seconds * header.sound_rate)
    return Header(AUDIO, frames=frames, rate=header.sound_rate, channels=header.channels)


def _webp_size(head: bytes) -> tuple[int, int]:
    """Return the size of the canvas. Pillow would allocate the canvas on opening."""
    kind = head[12:16]
    if kind == b"VP8X":
        wide, high = head[24:27] + b"\0", head[27:30] + b"\0"
        return struct.unpack("<I", wide)[0] + 1, struct.unpack("<I", high)[0] + 1
    if kind == b"VP8L" and head[20] == 0x2F:
        bits = struct.unpack("<I", head[21:25])[0]
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        wide, high = struct.unpack("<HH", head[26:30])
        return wide & 0x3FFF, high & 0x3FFF
    raise ValueError("not a WebP header")


def _image_size(file: BinaryIO) -> tuple[int, int]:
    from PIL import Image

    with pillow_limit(None), Image.open(file) as image:  # ``_check`` checks the size
        return image.size


def _sound(file: BinaryIO) -> Header:
    import soundfile

    with soundfile.SoundFile(file) as sound:
        check_whole(sound)
        return Header(AUDIO, frames=sound.frames, rate=sound.samplerate, channels=sound.channels)


def check_whole(sound: Any) -> None:
    """Raise a ``SampleError`` if a ``soundfile.SoundFile`` has less data than its header announces.
    libsndfile reads the available data and only logs the difference."""
    for pattern in _CUT_OFF:
        if match := pattern.search(sound.extra_info):
            announced, actual = int(match["said"]), int(match["found"])
            if actual < announced < _UNKNOWN_SIZE:
                raise SampleError(
                    f"the file is cut off: its header announces {announced:,} "
                    f"{'frames' if 'ds64' in match[0] else 'bytes'}, it has {actual:,}"
                )


def _check(header: Header, limits: Limits) -> None:
    if header.kind == IMAGE:
        pixels = header.width * header.height
        if not pixels:
            raise SampleError(f"the image has no pixels ({header.width} x {header.height})")
        if pixels > limits.max_image_pixels:
            raise SampleError(
                f"{header.width} x {header.height} = {pixels:,} pixels, above "
                f"data.max_image_pixels ({limits.max_image_pixels:,})"
            )
    if header.kind == AUDIO:
        if header.frames <= 0:
            raise SampleError("the file holds no sound")
        if not 0 < header.rate <= MAX_SAMPLE_RATE:
            raise SampleError(f"its sample rate is {header.rate:,} Hz, above {MAX_SAMPLE_RATE:,}")
        samples = header.frames * max(header.channels, -(-REFERENCE_RATE // header.rate))
        if samples > limits.max_audio_samples:
            raise SampleError(
                f"{header.frames:,} frames of {header.channels} channels at {header.rate:,} Hz "
                f"are {samples:,} samples, above data.max_audio_samples "
                f"({limits.max_audio_samples:,})"
            )


@contextmanager
def pillow_limit(pixels: int | None) -> Iterator[None]:
    """Set Pillow's limit of pixels for the length of a ``with`` block; Pillow refuses images of
    more than twice the limit."""
    from PIL import Image

    with _PILLOW:
        old_limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, pixels
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = old_limit
