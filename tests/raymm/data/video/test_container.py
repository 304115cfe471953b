"""Headers of video files: limits, wrong rates, endless files, and files that refer to others."""

from __future__ import annotations

import functools
import io
import struct

import pytest

from raymm.data.video.container import read_header
from raymm.data.video.frames import FrameLimits, FrameSampling, read_clip
from raymm.errors import SampleError
from tests.support import clips

LIMITS = FrameLimits(2**22, 3600, 100_000)


clip = functools.cache(clips.make_clip)


def with_avi_rate(scale: int, rate: int) -> bytes:
    """Return an AVI file with another rate in its header."""
    data = bytearray(clip("avi"))
    place = data.index(b"strh") + 8 + 20
    assert struct.unpack_from("<II", data, place) == (1, clips.RATE)
    struct.pack_into("<II", data, place, scale, rate)
    return bytes(data)


def with_mp4_timescale(value: int) -> bytes:
    """Return an MP4 file with another time unit in its header."""
    data = bytearray(clip("mp4"))
    place = data.index(b"mdhd") + 4 + 12
    struct.pack_into(">I", data, place, value)
    return bytes(data)


@pytest.mark.parametrize(("data", "message"), [
    (with_avi_rate(1, 20_000), "20000 frames per second"),
    (with_avi_rate(1_000_000, 1), "data.max_video_seconds"),
    (with_mp4_timescale(2**30), "frames per second"),
    (with_mp4_timescale(100), "header is inconsistent"),
])  # fmt: skip
def test_wrong_rates(data, message):
    with pytest.raises(SampleError, match=message):
        read_clip(io.BytesIO(data), FrameSampling(), LIMITS)


class Pipe(io.RawIOBase):
    """Stream that cannot seek."""

    def __init__(self):
        self.data = bytearray()

    def writable(self):
        return True

    def seekable(self):
        return False

    def write(self, data):
        self.data += bytes(data)
        return len(data)


def test_endless_files():
    pipe = Pipe()
    clips.make_clip("webm", options={"live": "1"}, file=pipe)
    with pytest.raises(SampleError, match="its header has no duration"):
        read_clip(io.BytesIO(bytes(pipe.data)), FrameSampling(), LIMITS)
    limits = FrameLimits(LIMITS.max_pixels, LIMITS.max_seconds, 50)
    data = clip("mpegts", 60)
    with pytest.raises(SampleError, match="60 frames.*data.max_video_frames"):
        read_clip(io.BytesIO(data), FrameSampling(), limits)
    with pytest.raises(SampleError, match="data.max_video_seconds"):
        read_clip(io.BytesIO(data), FrameSampling(), FrameLimits(2**22, 2, 50))
    # More frames than in the header: AVI's number is used, and the last frames never requested.
    shorter = bytearray(clip("avi", 60, codec="mpeg4"))
    struct.pack_into("<I", shorter, shorter.index(b"strh") + 8 + 32, 10)
    assert len(read_clip(io.BytesIO(bytes(shorter)), FrameSampling(25, 100), LIMITS).frames) <= 60


def test_large_frames_are_refused_by_the_header():
    data = clip("mp4", 2, (1024, 768), codec="mjpeg")
    with pytest.raises(SampleError, match="above data.max_image_pixels"):
        read_clip(io.BytesIO(data), FrameSampling(), FrameLimits(2**19, 3600, 1000))
    # A header with fewer pixels than the frames have: no decoder allocates more.
    liar = data.replace(struct.pack(">HH", 1024, 768), struct.pack(">HH", 64, 48))
    assert liar != data
    with pytest.raises(SampleError):
        read_clip(io.BytesIO(liar), FrameSampling(), FrameLimits(2**19, 3600, 1000))


def test_nothing_else_is_opened(tmp_path):
    secret = tmp_path / "secret.ts"
    secret.write_bytes(clip("mpegts"))
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:1.6,\n{secret}\n#EXT-X-ENDLIST\n"
    for text in (playlist, f"ffconcat version 1.0\nfile {secret}\n"):
        with pytest.raises(SampleError, match="it is not an MP4"):
            read_header(io.BytesIO(text.encode() + bytes(200)), 2**22)
    rare = clip("avi", codec="flv1")
    with pytest.raises(SampleError, match="codec 'flv'|no readable frames"):
        read_clip(io.BytesIO(rare), FrameSampling(), LIMITS)
