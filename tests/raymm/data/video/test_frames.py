"""Selected frames equal those of full decoding; read ranges, and errors of files."""

from __future__ import annotations

import functools
import io

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.data.samples.headers import OTHER, Limits, check_media
from raymm.data.samples.media import MediaBytes
from raymm.data.samples.processors import read_track
from raymm.data.video.container import header_of
from raymm.data.video.frames import FrameLimits, FrameSampling, read_clip
from raymm.errors import SampleError
from tests.support import clips

LIMITS = FrameLimits(2**22, 3600, 100_000)
clip = functools.cache(clips.make_clip)


def oracle(data: bytes, sampling: FrameSampling) -> tuple[np.ndarray, np.ndarray]:
    """Decode all frames, and return the last that begins at or before each time."""
    with av.open(io.BytesIO(data)) as container:
        header = header_of(container)
        frames = list(container.decode(container.streams.video[0]))
    chosen = []
    for time in sampling.times(header.seconds):
        shown = [frame for frame in frames if frame.time <= header.start + time + 1e-6]
        chosen.append((shown or frames[:1])[-1])
    width, height = sampling.size(chosen[0].width, chosen[0].height)
    pixels = [f.reformat(width=width, height=height, format="rgb24").to_ndarray() for f in chosen]
    return np.stack(pixels), np.array([frame.time - header.start for frame in chosen])


samplings = st.builds(
    FrameSampling, st.none() | st.floats(0.3, 60), st.integers(1, 50), st.integers(60, 4000)
)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(clips.FORMATS)), st.sampled_from([4, 12, 250]), st.booleans(), samplings
)
def test_frames_are_those_of_decoding_everything(format, gop, uneven, sampling):
    data = clip(format, gop=gop, uneven=uneven)
    result = read_clip(io.BytesIO(data), sampling, LIMITS)
    pixels, times = oracle(data, sampling)
    assert np.array_equal(result.frames, pixels)
    assert np.allclose(result.times, times, atol=1e-9, rtol=0)
    assert np.all(np.diff(result.times) >= 0)
    assert result.frames.shape[1] * result.frames.shape[2] <= sampling.max_pixels
    assert len(result.frames) <= sampling.max_frames


@settings(max_examples=40, deadline=None)
@given(st.floats(0.01, 10_000), samplings)
def test_times(seconds, sampling):
    times = sampling.times(seconds)
    assert 1 <= len(times) <= sampling.max_frames
    assert times[0] == 0 and times[-1] < seconds + 1e-6
    if sampling.fps is None:
        assert len(times) == sampling.max_frames
    elif seconds * sampling.fps < sampling.max_frames:
        assert np.allclose(np.diff(times), 1 / sampling.fps)
        assert abs(len(times) - seconds * sampling.fps) <= 1


class Counting(io.BytesIO):
    """File that counts the bytes read."""

    count = 0

    def read(self, size=-1):
        data = super().read(size)
        self.count += len(data)
        return data


@pytest.mark.parametrize("format", ["mp4", "matroska", "avi"])
def test_only_needed_bytes_are_read(format):
    data = clip(format, 200, (480, 360), codec="mjpeg")
    file = Counting(data)
    result = read_clip(file, FrameSampling(max_frames=2), LIMITS)
    assert result.indices.tolist() == [0, 100]
    everything = Counting(data)
    read_clip(everything, FrameSampling(fps=25, max_frames=400, max_pixels=100), LIMITS)
    assert everything.count > len(data) > 5 * file.count


def test_frames_are_turned_upright():
    data = clip("mp4", 4, turned=90, codec="mjpeg")
    frames = read_clip(io.BytesIO(data), FrameSampling(max_frames=1), LIMITS).frames
    assert frames.shape == (1, 64, 48, 3)
    error = np.abs(frames[0].astype(int) - np.rot90(clips.picture(0, 64, 48)))
    assert np.median(error) < 10


@pytest.mark.parametrize("format", sorted(set(clips.FORMATS) - {"mpegts"}))
def test_truncated_files(format):
    data = clip(format)
    for share in (0.2, 0.5, 0.8):
        with pytest.raises(SampleError, match="cut off|no readable frames"):
            read_clip(io.BytesIO(data[: int(share * len(data))]), FrameSampling(), LIMITS)


@pytest.mark.parametrize("format", sorted(clips.FORMATS))
def test_files_without_frames(format):
    data = clip(format, 0) or clip(format)[:188]  # a transport stream without frames is not a file
    with pytest.raises(SampleError):
        read_clip(io.BytesIO(data), FrameSampling(), LIMITS)


@pytest.mark.parametrize("format", sorted(clips.FORMATS))
def test_the_sound_track(format):
    rate, sound = read_track(io.BytesIO(clip(format, sound=True)))
    assert sound.dtype == np.float32 and sound.shape[1] == 1
    assert abs(len(sound) / rate - 1.6) < 0.12
    middle = sound[rate // 2 : rate, 0]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert abs(np.argmax(spectrum) * rate / len(middle) - clips.TONE) < 4
    assert 0.25 < np.abs(middle).max() < 0.35


def test_sounds_that_cannot_be_used():
    with pytest.raises(SampleError, match="no sound track"):
        read_track(io.BytesIO(clip("mp4")))
    # The audio is after the pictures.
    data = clip("matroska", sound=True)
    with pytest.raises(SampleError, match="sound track is cut off"):
        read_track(io.BytesIO(data[: -len(data) // 4]))
    with pytest.raises(SampleError, match="data.max_audio_samples"):
        check_media(MediaBytes("a", data), Limits(max_audio_samples=10_000))
    assert check_media(MediaBytes("a", clip("mp4")), Limits()).kind == OTHER
