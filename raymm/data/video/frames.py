"""Chosen frames of a video file, of which no more is decoded than they need.

A frame is chosen by time: the one that is shown then, whatever rate the header says and however
long each frame is shown. From one to the next the decoder goes on, or begins at the last key frame
before, whichever is nearer.
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

# Formats whose files say where their key frames are.
_SEEKABLE = ("mov", "matroska", "avi")
# Times of frames are fractions, those that are asked for not.
_SAME_S = 1e-6
# What a file may lack of the length that it announces: writers round, and count a last frame or
# the sound's last packet differently.
_SHORT_S, _SHORT_FRAMES = 0.25, 3
# Frames per second as which frames at uneven times are numbered.
_FINE_RATE = 1000.0


@dataclass(frozen=True)
class FrameSampling:
    """Which frames of a file become an item, and how large.

    Attributes:
        fps: frames per second; None for ``max_frames`` of every file.
        max_frames: where ``fps`` gave more, so many at equal distances.
        max_pixels: of a frame; larger ones are scaled down.
    """

    fps: float | None = None
    max_frames: int = 32
    max_pixels: int = 2**19

    def times(self, seconds: float) -> list[float]:
        """Of the frames of a file, in seconds from its beginning, ascending.

        Args:
            seconds: its length, above 0.
        """
        if self.fps is not None:
            count = max(math.ceil(seconds * self.fps - 1e-6), 1)
            if count <= self.max_frames:
                return [number / self.fps for number in range(count)]
        return [number * seconds / self.max_frames for number in range(self.max_frames)]

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) that frames are scaled to, with the ratio of their sides."""
        scale = min(math.sqrt(self.max_pixels / (width * height)), 1.0)
        return max(math.floor(width * scale), 1), max(math.floor(height * scale), 1)


@dataclass(frozen=True)
class FrameLimits:
    """What a file may have at most, as of :class:`raymm.data.samples.limits.Limits`."""

    max_pixels: int
    max_seconds: float
    max_frames: int


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames of a video.

    Attributes:
        frames: (T, H, W, 3) uint8 RGB, upright.
        times: (T,) float64, when each begins, in seconds from the beginning.
        rate: frames per second of the file.
        seconds: its length.
    """

    frames: np.ndarray = field(repr=False)
    times: np.ndarray
    rate: float
    seconds: float

    @classmethod
    def from_frames(cls, frames: Sequence[np.ndarray], times: Sequence[float]) -> Clip:
        """Make a clip of frames whose times are known.

        Args:
            frames: (H, W, 3) uint8, all of one size.
            times: of each, in seconds, ascending.

        Raises:
            SampleError: another number of times than of frames, times that do not ascend, or frames
                of several sizes.
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
        """Frames of the file."""
        return max(round(self.seconds * self.rate), int(self.indices.max()) + 1)

    @property
    def indices(self) -> np.ndarray:
        """(T,) int64, which of the file's frames they are, at its rate."""
        return np.rint(self.times * self.rate).astype(np.int64)


def read_clip(file: BinaryIO, sampling: FrameSampling, limits: FrameLimits) -> Clip:
    """Decode the chosen frames.

    Args:
        file: seekable, at its beginning.
        sampling: which.
        limits: of the file.

    Raises:
        SampleError: no video, one above a limit, one that ends before its header says, or one that
            cannot be decoded.
    """
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
    """
    Raises:
        SampleError: the file ends before its header says.
    """
    stream = pictures_of(container)
    due = header.start + header.seconds
    if not _seek(container, stream, due):
        _seek(container, stream, header.start)
    end = None
    for packet in container.demux(stream):
        at = packet.pts if packet.pts is not None else packet.dts
        if at is not None and packet.size and not packet.is_corrupt:
            end = max(end or 0.0, float((at + (packet.duration or 0)) * packet.time_base))
    if end is None:
        raise SampleError("it has no frames, or is cut off before the first")
    if end < due - max(_SHORT_S, _SHORT_FRAMES / header.rate):
        raise SampleError(
            f"it is cut off: its header announces {header.seconds:.2f} s, it has "
            f"{max(end - header.start, 0.0):.2f}"
        )


def _key_before(container: Any, time: float) -> float:
    """When the frame is shown that decoding has to begin with."""
    stream = pictures_of(container)
    if not _seek(container, stream, time):
        return -math.inf
    packet = next(iter(container.demux(stream)))
    at = packet.pts if packet.pts is not None else packet.dts
    return -math.inf if at is None else float(at * packet.time_base)


def _seek(container: Any, stream: Any, time: float) -> bool:
    """Go to the last key frame before; whether that could be found."""
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
    """Frames, (T, H, W, 3) uint8, and when each begins."""
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
    """The frame that is shown at each time, ascending; of equal ones the same."""
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
        assert frame is not None  # the first of the stream, at least
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
    """Whether the last frame may be shown so long."""
    shown = 1 / float(stream.average_rate or stream.guessed_rate)
    return time <= frame.time + max(_SHORT_S, _SHORT_FRAMES * shown) + shown


def _upright(frame: Any, width: int, height: int) -> np.ndarray:
    """(H, W, 3) uint8 RGB, turned as the file says."""
    pixels = frame.reformat(width=width, height=height, format="rgb24").to_ndarray()
    quarters = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, quarters)) if quarters else pixels
