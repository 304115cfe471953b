"""Sound tracks of video files, and sound files in the same containers (M4A, WebM)."""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np

from raymm.data.video.container import opened, seconds_of, sound_of
from raymm.errors import SampleError

# Limit on the frames that FFmpeg may decode to detect stream parameters; no frame is used here.
_PIXELS = 2**26
# A track may be this many seconds shorter than announced: codecs add padding before the first
# sample, and end with a complete frame.
_SHORT_S = 0.5


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
