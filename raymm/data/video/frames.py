"""Decoding of selected frames of a video file, with as little other decoding as possible.

A frame is selected by time: the frame shown at that time, regardless of the frame rate in the
header. To reach the next frame, the decoder continues, or seeks to the last key frame before it if
that is closer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from raymm.data.video.container import VideoHeader, check_pictures, header_of, opened, pictures_of
from raymm.errors import SampleError

# Formats with an index of key frames.
_SEEKABLE = ("mov", "matroska", "avi")
# Tolerance in seconds: time stamps are fractions, requested times are floats.
_SAME_S = 1e-6
# A file may be this many seconds or frames shorter than announced: writers round, and differ in
# whether they count the last frame or sound packet.
_SHORT_S, _SHORT_FRAMES = 0.25, 3
# Nominal frames per second for frames at irregular times.
_FINE_RATE = 1000.0


@dataclass(frozen=True)
class FrameSampling:
    """Selection and size of the frames that are decoded from a file.

    Attributes:
        fps: frames per second; None for ``max_frames`` frames of every file.
        max_frames: limit on the frames of an item; above it, this many frames at equal distances.
        max_pixels: most pixels of a frame; larger frames are scaled down.
    """

    fps: float | None = None
    max_frames: int = 32
    max_pixels: int = 2**19

    def times(self, seconds: float) -> list[float]:
        """Return the times of the frames, ascending, in seconds from the beginning; ``seconds`` is
        above 0."""
        if self.fps is not None:
            count = max(math.ceil(seconds * self.fps - 1e-6), 1)
            if count <= self.max_frames:
                return [number / self.fps for number in range(count)]
        return [number * seconds / self.max_frames for number in range(self.max_frames)]

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) after scaling, which keeps the aspect ratio."""
        scale = min(math.sqrt(self.max_pixels / (width * height)), 1.0)
        return max(math.floor(width * scale), 1), max(math.floor(height * scale), 1)


@dataclass(frozen=True)
class FrameLimits:
    """Limits of a video file, see :class:`raymm.data.samples.headers.Limits`."""

    max_pixels: int
    max_seconds: float
    max_frames: int


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames of a video.

    Attributes:
        frames: (T, H, W, 3) uint8 RGB, upright.
        times: (T,) float64, start of each frame in seconds from the beginning.
        rate: frames per second of the file.
    """

    frames: np.ndarray = field(repr=False)
    times: np.ndarray
    rate: float
    seconds: float

    @classmethod
    def from_frames(cls, frames: Sequence[np.ndarray], times: Sequence[float]) -> Clip:
        """Return a clip of frames with known times. Raise a ``SampleError`` if the numbers of
        frames and times differ, times do not ascend, or frames differ in size.

        Args:
            frames: (H, W, 3) uint8, all of one size.
            times: time of each frame in seconds, ascending.
        """
        shown = np.asarray(times, np.float64)
        if len(shown) != len(frames):
            raise SampleError(
                f"the video has {len(frames)} frames and {len(shown)} times; accepted: a time for "
                "each frame"
            )
        steps = np.diff(shown)
        if not np.isfinite(shown).all() or (shown < 0).any() or (steps <= 0).any():
            raise SampleError(
                f"the times of the frames are {shown.tolist()}; accepted: seconds from the "
                "beginning, each later than the one before"
            )
        if len(sizes := {frame.shape[:2] for frame in frames}) > 1:
            named = " and ".join(f"{width} x {height}" for height, width in sorted(sizes)[:2])
            raise SampleError(f"the frames of the video have different sizes: {named} pixels")
        step = float(np.median(steps)) if len(steps) else 1.0
        positions = shown / step
        even = np.allclose(positions, np.rint(positions), atol=1e-3)
        return cls(
            np.stack(list(frames)), shown, 1 / step if even else _FINE_RATE, shown[-1] + step
        )

    @property
    def total(self) -> int:
        """Number of frames in the file."""
        return max(round(self.seconds * self.rate), int(self.indices.max()) + 1)

    @property
    def indices(self) -> np.ndarray:
        """(T,) int64, position of each frame in the file at its frame rate."""
        return np.rint(self.times * self.rate).astype(np.int64)


def read_clip(file: BinaryIO, sampling: FrameSampling, limits: FrameLimits) -> Clip:
    """Decode the selected frames of a file that is seekable and at its beginning. Raise a
    ``SampleError`` if the file is not a video, exceeds a limit, ends before its announced duration,
    or cannot be decoded."""
    with opened(file, limits.max_pixels) as container:
        header = header_of(container)
        check_pictures(header, limits.max_pixels, limits.max_seconds, limits.max_frames)
        times = [header.start + time for time in sampling.times(header.seconds)]
        keys: list[float] = []
        if container.format.name.split(",")[0] in _SEEKABLE:
            _check_end(container, header)
            keys = [_key_before(container, time) for time in times]
    file.seek(0)
    try:
        frames, shown = _decoded(file, times, keys, sampling, limits)
    except SampleError as error:
        if error.reason != _NO_KEY_FRAME:
            raise
        file.seek(0)
        frames, shown = _decoded(file, times, [], sampling, limits)
    return Clip(frames, np.asarray(shown) - header.start, header.rate, header.seconds)


_NO_KEY_FRAME = "its key frames are not at the indexed times"


def _check_end(container: Any, header: VideoHeader) -> None:
    """Raise a ``SampleError`` if the file ends before its announced duration."""
    stream = pictures_of(container)
    announced_end = header.start + header.seconds
    if not _seek(container, stream, announced_end):
        _seek(container, stream, header.start)
    end = None
    for packet in container.demux(stream):
        timestamp = packet.pts if packet.pts is not None else packet.dts
        if timestamp is not None and packet.size and not packet.is_corrupt:
            end = max(end or 0.0, float((timestamp + (packet.duration or 0)) * packet.time_base))
    if end is None:
        raise SampleError("it has no frames, or is cut off before the first")
    if end < announced_end - max(_SHORT_S, _SHORT_FRAMES / header.rate):
        raise SampleError(
            f"it is cut off: its header announces {header.seconds:.2f} s, it has "
            f"{max(end - header.start, 0.0):.2f}"
        )


def _key_before(container: Any, time: float) -> float:
    """Return the time of the key frame at which decoding has to start for a time; -inf if unknown.
    """
    stream = pictures_of(container)
    if not _seek(container, stream, time):
        return -math.inf
    packet = next(iter(container.demux(stream)))
    timestamp = packet.pts if packet.pts is not None else packet.dts
    return -math.inf if timestamp is None else float(timestamp * packet.time_base)


def _seek(container: Any, stream: Any, time: float) -> bool:
    """Seek to the last key frame before a time; return False if FFmpeg cannot seek."""
    from av.error import FFmpegError

    try:
        container.seek(math.floor(time / stream.time_base), stream=stream, backward=True)
    except FFmpegError:
        return False
    return True


def _decoded(
    file: BinaryIO, times: list[float], keys: list[float], sampling: FrameSampling,
    limits: FrameLimits,
) -> tuple[np.ndarray, list[float]]:
    """Return the frames, (T, H, W, 3) uint8, and the time at which each begins."""
    frames: list[np.ndarray] = []
    shown: list[float] = []
    size: tuple[int, int] | None = None
    with opened(file, limits.max_pixels) as container:
        for frame in _chosen(container, times, keys, limits.max_frames):
            if frames and frame.time == shown[-1]:
                frames.append(frames[-1])
            else:
                size = size or sampling.size(frame.width, frame.height)
                frames.append(_upright(frame, *size))
            shown.append(frame.time)
    return np.stack(frames), shown


def _chosen(
    container: Any, times: list[float], keys: list[float], most: int
) -> Iterator[Any]:
    """Yield the frame shown at each of the ascending times; frames may repeat."""
    stream = pictures_of(container)
    decoder = _frames(container, stream, most)
    frame, following = None, next(decoder, None)
    if following is None:
        raise SampleError("it has no frames")
    for time, key in itertools.zip_longest(times, keys, fillvalue=-math.inf):
        if following is not None and key > following.time:
            if not _seek(container, stream, time):
                raise SampleError(_NO_KEY_FRAME)
            decoder = _frames(container, stream, most)
            frame, following = None, next(decoder, None)
            if following is None or following.time > time + _SAME_S:
                raise SampleError(_NO_KEY_FRAME)
        while following is not None and (frame is None or following.time <= time + _SAME_S):
            frame, following = following, next(decoder, None)
        assert frame is not None  # at least the first frame of the stream
        if following is None and not _lasts(frame, time, stream):
            raise SampleError(f"it is cut off: its last frame is at {frame.time:.2f} s")
        yield frame


def _frames(container: Any, stream: Any, most: int) -> Iterator[Any]:
    for number, frame in enumerate(container.decode(stream)):
        if number >= most:
            raise SampleError(
                f"more than {most:,} frames (data.max_video_frames); its header says fewer"
            )
        if frame.time is None or frame.is_corrupt:
            raise SampleError("it is damaged: a frame cannot be decoded")
        yield frame


def _lasts(frame: Any, time: float, stream: Any) -> bool:
    """Return True if the last frame of the stream may still be shown at a time."""
    shown = 1 / float(stream.average_rate or stream.guessed_rate)
    return time <= frame.time + max(_SHORT_S, _SHORT_FRAMES * shown) + shown


def _upright(frame: Any, width: int, height: int) -> np.ndarray:
    """Return a frame as (H, W, 3) uint8 RGB, scaled and rotated as the file specifies."""
    pixels = frame.reformat(width=width, height=height, format="rgb24").to_ndarray()
    quarters = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, quarters)) if quarters else pixels
