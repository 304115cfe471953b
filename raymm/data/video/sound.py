"""The sound track of a video file, and files of sound in the same containers (M4A, WebM)."""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np

from raymm.data.video.container import opened, seconds_of, sound_of
from raymm.errors import SampleError

# No picture is decoded here; FFmpeg looks at some to tell what they are.
_PIXELS = 2**26
# What a track may lack of the length that it announces: codecs begin before the first sample that
# is heard, and end with a whole frame.
_SHORT_S = 0.5


def read_track(file: BinaryIO) -> tuple[int, np.ndarray]:
    """(Hz, (samples, channels) float32) of the sound track.

    Args:
        file: seekable, at its beginning, within the limits that its header was held to.

    Raises:
        SampleError: it has none, ends before its header says, or cannot be decoded.
    """
    import av

    with opened(file, _PIXELS) as container:
        stream = sound_of(container)
        if stream is None:
            raise SampleError("the file has no sound track")
        rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels
        if not rate or not channels:
            raise SampleError(f"its sound track has {channels} channels at {rate} Hz")
        due = round(float(seconds_of(container, stream)) * rate)
        # Of all codecs the same samples; channels and rate stay.
        same = av.AudioResampler(format="fltp", layout=stream.codec_context.layout, rate=rate)
        parts: list[np.ndarray] = []
        count = 0
        for frame in container.decode(stream):
            for part in same.resample(frame):
                parts.append(_samples(part))
                count += parts[-1].shape[1]
                if count > due + rate:
                    raise SampleError(
                        f"its sound track is longer than the {due / rate:.2f} s that it announces"
                    )
        parts += [_samples(part) for part in same.resample(None)]
    if not count:
        raise SampleError("the file holds no sound")
    if count < due - _SHORT_S * rate:
        raise SampleError(
            f"its sound track is cut off: it announces {due / rate:.2f} s and has "
            f"{count / rate:.2f}"
        )
    return rate, np.concatenate(parts, axis=1).T


def _samples(frame: Any) -> np.ndarray:
    """(channels, samples) float32."""
    return frame.to_ndarray()
