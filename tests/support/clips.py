"""Clips for tests, made with PyAV: moving blocks, different in every frame, and a tone."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np

RATE = 25
TONE = 440.0  # Hz
SOUND_RATE = 16_000
# Format -> codecs of pictures and of sound.
FORMATS = {
    "mp4": ("libx264", "aac"), "mov": ("mjpeg", "aac"), "matroska": ("libx264", "aac"),
    "webm": ("libvpx-vp9", "libopus"), "avi": ("mpeg4", "mp3"), "mpegts": ("mpeg2video", "mp2"),
}  # fmt: skip


def make_clip(
    format: str = "mp4", frames: int = 40, size: tuple[int, int] = (64, 48), *, gop: int = 12,
    rate: int = RATE, sound: bool = False, codec: str | None = None, turned: int = 0,
    options: dict[str, str] | None = None, uneven: bool = False, file: Any = None,
) -> bytes:
    """Return a clip's bytes.

    Args:
        format: key of :data:`FORMATS`.
        frames: number of frames; 0 for an empty file.
        size: width and height.
        gop: maximum distance of key frames.
        rate: frames per second.
        sound: True for a tone as long as the pictures.
        codec: codec of the pictures.
        turned: rotation in degrees.
        options: options of the container.
        uneven: True to show every third frame three times as long.
        file: file to write instead of returning bytes.
    """
    av.logging.set_level(None)
    target = io.BytesIO() if file is None else file
    pictures, sounds = FORMATS[format]
    with av.open(target, "w", format=format, options=options or {}) as container:
        stream: Any = container.add_stream(codec or pictures, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if (codec or pictures) == "mjpeg" else "yuv420p"
        stream.gop_size = gop
        stream.codec_context.thread_count = 1
        if turned:
            stream.set_display_rotation(turned)
        track: Any = container.add_stream(sounds, rate=SOUND_RATE, layout="mono") if sound else None
        if not frames:
            container.start_encoding()
        shown = 0
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(number, *size), format="rgb24")
            frame.pts, frame.time_base = shown, Fraction(1, rate)
            shown += 3 if uneven and number % 3 == 0 else 1
            container.mux(stream.encode(frame))
        if frames:
            container.mux(stream.encode())
        if sound:
            _add_tone(container, track, frames / rate)
    return target.getvalue() if file is None else b""


def picture(number: int, width: int, height: int) -> np.ndarray:
    """Return (H, W, 3) uint8: blocks that move to the right, and a bar that encodes the number."""
    random = np.random.default_rng(7)
    blocks = random.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3))
    pixels = blocks.repeat(8, 0).repeat(8, 1)[:height, :width]
    pixels = np.roll(pixels, 2 * number, axis=1)
    pixels[: height // 4] = number * 5 % 256
    return pixels.astype(np.uint8)


def tone(seconds: float) -> np.ndarray:
    """Return a tone, (samples,) float32."""
    at = np.arange(round(seconds * SOUND_RATE)) / SOUND_RATE
    return (0.3 * np.sin(2 * np.pi * TONE * at)).astype(np.float32)


def _add_tone(container: Any, track: Any, seconds: float) -> None:
    convert = av.AudioResampler(
        format=track.codec_context.format, layout=track.codec_context.layout, rate=track.rate,
        frame_size=track.codec_context.frame_size or 1024,
    )
    samples = av.AudioFrame.from_ndarray(tone(seconds)[None], format="fltp", layout="mono")
    samples.sample_rate = SOUND_RATE
    for part in [*convert.resample(samples), *convert.resample(None)]:
        container.mux(track.encode(part))
    container.mux(track.encode())
