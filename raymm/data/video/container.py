"""Opening of video files, and reading of their headers.

The format is detected here and passed to FFmpeg. Left to guess, FFmpeg would also accept playlists,
which refer to further files and URLs. Only the codecs listed here are decoded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, BinaryIO

from raymm.errors import SampleError
from raymm.packages import require

# First bytes of a file, which identify its format.
HEAD = 189
# Frames per second; slow-motion cameras reach about a thousand.
MAX_RATE = 1000
# Shortest video, in frames; below one, because headers round durations.
_LEAST_FRAMES = 0.5

_CODECS = (
    "h264", "hevc", "libdav1d", "av1", "vp8", "vp9", "libvpx", "libvpx-vp9", "mpeg4", "mpeg2video",
    "mpeg1video", "mjpeg", "theora",
    "aac", "mp3", "mp3float", "mp2", "mp2float", "opus", "libopus", "vorbis", "flac", "alac",
    "ac3", "eac3", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_u8",
)  # fmt: skip
# Time base of container durations in FFmpeg: microseconds.
_CONTAINER_BASE = Fraction(1, 1_000_000)
_PACKET = 188  # bytes of an MPEG transport stream packet
_SEEK_END = 2


@dataclass(frozen=True)
class VideoHeader:
    """Contents of a video header. Fields of frames, or of sound, are 0 if the file has none.

    Attributes:
        width, height: pixels, as stored.
        start: time stamp of the first frame in seconds.
        sound_rate, channels: Hz and number of channels of the sound track.
    """

    width: int = 0
    height: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    start: float = 0.0
    sound_rate: int = 0
    channels: int = 0
    sound_seconds: float = 0.0

    @property
    def frames(self) -> int:
        """Number of frames according to the header."""
        return max(round(self.seconds * self.rate), 1)


def format_of(head: bytes) -> str | None:
    """Return the FFmpeg name of a format, given the first :data:`HEAD` bytes; None if not
    supported."""
    if head[4:8] == b"ftyp" and head[8:12] not in (b"avif", b"avis", b"heic", b"mif1", b"jp2 "):
        return "mov"
    if head[4:8] in (b"moov", b"mdat", b"wide") and int.from_bytes(head[:4], "big") >= 8:
        return "mov"  # old QuickTime files have no brand
    if head[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    if len(head) > _PACKET and head[0] == head[_PACKET] == 0x47:
        return "mpegts"
    return None


def decoder(purpose: str) -> Any:
    """Return the package ``av``. If it is not installed, raise a ``ConfigError`` that names
    ``purpose``."""
    return require("av", "video", purpose)


@contextmanager
def opened(file: BinaryIO, max_pixels: int) -> Iterator[Any]:
    """Open a seekable video file as a PyAV container for the length of a ``with`` block. Decoders
    refuse frames of more than ``max_pixels``. Raise a ``SampleError`` if the file is not a video,
    or cannot be read, and a ``ConfigError`` if the package ``av`` is not installed."""
    av = decoder("a video file")
    head = file.read(HEAD)
    file.seek(0)
    kind = format_of(head)
    if kind is None:
        raise SampleError("it is not an MP4, MOV, WebM, Matroska, AVI or MPEG-TS file")
    options = {"codec_whitelist": ",".join(_CODECS), "max_pixels": str(max_pixels)}
    with _explained(), av.open(file, format=kind, options=options) as container:
        for stream in container.streams:
            # Several data workers run per node; more threads would compete for the same cores.
            if stream.type in ("video", "audio") and stream.codec_context is not None:
                stream.codec_context.thread_count = 1
        yield container


@contextmanager
def _explained() -> Iterator[None]:
    """Convert FFmpeg errors to a ``SampleError``."""
    from av import error as errors

    try:
        yield
    except errors.FFmpegError as error:
        cause = "it is cut off, or damaged" if isinstance(
            error, errors.EOFError | errors.InvalidDataError
        ) else "FFmpeg cannot read it"
        raise SampleError(f"{cause} ({error.strerror or type(error).__name__})") from error


def pictures_of(container: Any) -> Any:
    """Return the video stream that FFmpeg considers best, ignoring cover pictures. Raise a
    ``SampleError`` if there is none, or its codec is not supported."""
    from av.stream import Disposition

    covers = Disposition.attached_pic
    streams = [s for s in container.streams.video if not s.disposition & covers]
    if not streams:
        raise SampleError("the file has no pictures: it has no video stream")
    best = container.streams.best("video")
    stream = best if any(best is stream for stream in streams) else streams[0]
    _check_codec(stream)
    return stream


def sound_of(container: Any) -> Any | None:
    """Return the sound track that FFmpeg considers best; None if there is none. Raise a
    ``SampleError`` if its codec is not supported."""
    stream = container.streams.best("audio") if container.streams.audio else None
    if stream is not None:
        _check_codec(stream)
    return stream


def _check_codec(stream: Any) -> None:
    name = None if stream.codec_context is None else stream.codec_context.name
    if name not in _CODECS:
        raise SampleError(
            f"its {stream.type} stream uses the codec {name!r}, which is not supported, or is "
            f"damaged; accepted: {', '.join(_CODECS)}"
        )


def read_header(file: BinaryIO, max_pixels: int) -> VideoHeader:
    """Read the header of a video file; arguments and errors as in :func:`opened`. FFmpeg may decode
    some data to find the stream parameters."""
    with opened(file, max_pixels) as container:
        return header_of(container)


def header_of(container: Any) -> VideoHeader:
    """Return the header of an opened container; fields of absent streams have defaults."""
    values: dict[str, Any] = {}
    sound = None
    with contextlib.suppress(SampleError):
        stream = pictures_of(container)
        rate = stream.average_rate or stream.guessed_rate or 0
        values = {
            "width": stream.codec_context.width, "height": stream.codec_context.height,
            "seconds": float(seconds_of(container, stream)), "rate": float(rate),
            "start": float((stream.start_time or 0) * (stream.time_base or 0)),
        }
    with contextlib.suppress(SampleError):
        sound = sound_of(container)
    if sound is not None:
        values |= {
            "sound_rate": sound.codec_context.sample_rate or 0,
            "channels": sound.codec_context.channels or 0,
            "sound_seconds": float(seconds_of(container, sound)),
        }
    return VideoHeader(**values)


def seconds_of(container: Any, stream: Any) -> Fraction:
    """Return the announced duration of a stream in seconds; 0 if the file has none."""
    if stream.duration is not None and stream.time_base:
        return max(stream.duration * stream.time_base, Fraction(0))
    written = (stream.metadata or {}).get("DURATION", "")  # a tag in Matroska files
    with contextlib.suppress(ValueError):
        hours, minutes, seconds = written.split(":")
        return 3600 * Fraction(hours) + 60 * Fraction(minutes) + Fraction(seconds)
    return max((container.duration or 0) * _CONTAINER_BASE, Fraction(0))


def check_pictures(
    header: VideoHeader, max_pixels: int, max_seconds: float, max_frames: int
) -> None:
    """Raise a ``SampleError`` if a header is implausible or exceeds ``data.max_image_pixels``,
    ``data.max_video_seconds`` or ``data.max_video_frames``."""
    width, height, rate = header.width, header.height, header.rate
    if not width or not height:
        raise SampleError(
            "the file has no readable frames, or its frames are above data.max_image_pixels "
            f"({max_pixels:,})"
        )
    if width * height > max_pixels:
        raise SampleError(
            f"{width} x {height} = {width * height:,} pixels in a frame, above "
            f"data.max_image_pixels ({max_pixels:,})"
        )
    if not 0 < rate <= MAX_RATE:
        raise SampleError(
            f"its header says {rate:g} frames per second; accepted: above 0, up to {MAX_RATE}"
        )
    if not header.seconds > 0:
        raise SampleError(
            "its header has no duration, as in an unfinished recording; remux the file to add one "
            "(ffmpeg -i IN -c copy OUT)"
        )
    if header.seconds * rate < _LEAST_FRAMES:
        raise SampleError(
            f"its header is inconsistent: {rate:g} frames per second give no frame in "
            f"{header.seconds:g} s"
        )
    if header.seconds > max_seconds:
        raise SampleError(
            f"it is {header.seconds:,.0f} s long, above data.max_video_seconds ({max_seconds:,})"
        )
    if header.frames > max_frames:
        raise SampleError(
            f"{header.frames:,} frames ({header.seconds:,.1f} s at {rate:g} per second), above "
            f"data.max_video_frames ({max_frames:,})"
        )
