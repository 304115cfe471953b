"""Opens a video file, whatever it claims to be, and reads what it announces.

FFmpeg is told which format to expect: left to guess it also takes playlists, which name further
files and URLs. It decodes the codecs that are named here, no others.
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

# First bytes that tell the format.
HEAD = 189
# Cameras for slow motion stop at a thousand.
MAX_RATE = 1000
# Of a frame; headers round.
_LEAST_FRAMES = 0.5

_CODECS = (
    "h264", "hevc", "libdav1d", "av1", "vp8", "vp9", "libvpx", "libvpx-vp9", "mpeg4", "mpeg2video",
    "mpeg1video", "mjpeg", "theora",
    "aac", "mp3", "mp3float", "mp2", "mp2float", "opus", "libopus", "vorbis", "flac", "alac",
    "ac3", "eac3", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_u8",
)  # fmt: skip
# Seconds in FFmpeg's unit of a container.
_CONTAINER_BASE = Fraction(1, 1_000_000)
_PACKET = 188  # of a transport stream
_SEEK_END = 2


@dataclass(frozen=True)
class VideoHeader:
    """What a file announces. All 0 of pictures, or of sound, where it has none.

    Attributes:
        width, height: pixels, as stored.
        seconds: how long the pictures last.
        rate: frames per second.
        start: time stamp of the beginning, in seconds.
        sound_rate, channels: Hz of the sound track, and its channels.
        sound_seconds: how long it lasts.
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
        """How many pictures there are, as far as the header tells."""
        return max(round(self.seconds * self.rate), 1)


def format_of(head: bytes) -> str | None:
    """FFmpeg's name of a file's format; None if it is none of those that are read.

    Args:
        head: the file's first :data:`HEAD` bytes.
    """
    if head[4:8] == b"ftyp" and head[8:12] not in (b"avif", b"avis", b"heic", b"mif1", b"jp2 "):
        return "mov"
    if head[4:8] in (b"moov", b"mdat", b"wide") and int.from_bytes(head[:4], "big") >= 8:
        return "mov"  # as QuickTime began before it had brands
    if head[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    if len(head) > _PACKET and head[0] == head[_PACKET] == 0x47:
        return "mpegts"
    return None


def decoder(purpose: str) -> Any:
    """Return the package ``av``, which decodes video files and their sound tracks.

    Args:
        purpose: setting or file that needs the package.

    Raises:
        ConfigError: the package is not installed.
    """
    return require("av", "video", purpose)


@contextmanager
def opened(file: BinaryIO, max_pixels: int) -> Iterator[Any]:
    """The file as PyAV's container, for the length of a block.

    Args:
        file: seekable, at its beginning.
        max_pixels: of a frame; no decoder makes room for more.

    Raises:
        SampleError: the file is no video, or cannot be read.
        ConfigError: the package ``av`` is not installed.
    """
    av = decoder("a video file")
    head = file.read(HEAD)
    file.seek(0)
    kind = format_of(head)
    if kind is None:
        raise SampleError("it is not an MP4, MOV, WebM, Matroska, AVI or MPEG-TS file")
    options = {"codec_whitelist": ",".join(_CODECS), "max_pixels": str(max_pixels)}
    with _explained(), av.open(file, format=kind, options=options) as container:
        for stream in container.streams:
            # A worker is one of many: threads below it would only fight.
            if stream.type in ("video", "audio") and stream.codec_context is not None:
                stream.codec_context.thread_count = 1
        yield container


@contextmanager
def _explained() -> Iterator[None]:
    """FFmpeg's errors as what is wrong with the file."""
    from av import error as errors

    try:
        yield
    except errors.FFmpegError as error:
        what = "it is cut off, or damaged" if isinstance(
            error, errors.EOFError | errors.InvalidDataError
        ) else "FFmpeg cannot read it"
        raise SampleError(f"{what} ({error.strerror or type(error).__name__})") from error


def pictures_of(container: Any) -> Any:
    """The stream of pictures; of several FFmpeg's choice. A cover is none.

    Raises:
        SampleError: there is none.
    """
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
    """The sound track; of several FFmpeg's choice. None if there is none.

    Raises:
        SampleError: it is of a codec that is not read.
    """
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
    """What a file announces; nothing of it is decoded but what FFmpeg needs to tell a stream's
    parameters.

    Args:
        file: seekable, at its beginning.
        max_pixels: of a frame.

    Raises:
        SampleError: it is no video, or cannot be read.
    """
    with opened(file, max_pixels) as container:
        return header_of(container)


def header_of(container: Any) -> VideoHeader:
    """What an open file announces."""
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
    """How long a stream lasts as announced; 0 where nothing says it."""
    if stream.duration is not None and stream.time_base:
        return max(stream.duration * stream.time_base, Fraction(0))
    written = (stream.metadata or {}).get("DURATION", "")  # Matroska's, of one stream
    with contextlib.suppress(ValueError):
        hours, minutes, seconds = written.split(":")
        return 3600 * Fraction(hours) + 60 * Fraction(minutes) + Fraction(seconds)
    return max((container.duration or 0) * _CONTAINER_BASE, Fraction(0))


def check_pictures(
    header: VideoHeader, max_pixels: int, max_seconds: float, max_frames: int
) -> None:
    """Look whether what a header announces can be and is within limits.

    Args:
        header: of a video.
        max_pixels: of a frame (``data.max_image_pixels``).
        max_seconds: ``data.max_video_seconds``.
        max_frames: ``data.max_video_frames``.

    Raises:
        SampleError: names what is not.
    """
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
