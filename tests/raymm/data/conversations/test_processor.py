"""Processors of models: their arguments for videos, and the kinds of items that they accept."""

from __future__ import annotations

import io

import numpy as np
import pytest

from examples.vlm import tiny
from raymm.data.conversations.processor import IDS, ModelProcessor, example_items
from raymm.data.video.frames import FrameLimits, FrameSampling, read_clip
from raymm.errors import DataError
from tests.support import clips


class Recorder:
    """Wrapper of a processor that records its arguments."""

    def __init__(self, processor):
        self.processor, self.calls = processor, []

    def __getattr__(self, name):
        return getattr(self.processor, name)

    def __call__(self, **arguments):
        self.calls.append(arguments)
        raise ValueError("enough")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make("gemma3", tmp_path_factory.mktemp("gemma3") / "model", 1)[0]


def test_a_processor_gets_frames_and_their_times(folder):
    item = read_clip(
        io.BytesIO(clips.make_clip()), FrameSampling(fps=5), FrameLimits(2**22, 3600, 1000)
    )
    processor = ModelProcessor(str(folder))
    processor._processor = recorder = Recorder(processor._processor)
    frames = [np.zeros((4, 4, 3), np.uint8)] * 3
    with pytest.raises(ValueError, match="enough"):
        processor(["x", "y"], [{"video": [item]}, {"video": [frames]}])
    videos, metadata = (recorder.calls[0][name] for name in ("videos", "video_metadata"))
    assert videos[0].shape == (8, 48, 64, 3) and videos[1] is frames
    assert recorder.calls[0]["do_sample_frames"] is False
    assert metadata[0] == {
        "total_num_frames": 40, "fps": 25.0, "duration": 1.6, "height": 48, "width": 64,
        "frames_indices": [0, 5, 10, 15, 20, 25, 30, 35],
    }
    assert metadata[1]["fps"] is None and metadata[1]["frames_indices"] == [0, 1, 2]


def test_example_items_are_accepted_by_their_processor(folder):
    processor = ModelProcessor(str(folder))
    items = dict(example_items(processor))
    assert [list(media) for media in items.values()] == [["image"]]
    for text, media in items.items():
        tensors = processor([text], [media])
        plain = processor(["a"], [{}])
        assert tensors.keys() > plain.keys() and tensors[IDS].shape[1] > plain[IDS].shape[1]


def test_a_processor_of_pictures_has_no_sampling_rate(folder):
    with pytest.raises(ValueError, match="Gemma3Processor does not accept sound"):
        ModelProcessor(str(folder)).sampling_rate  # noqa: B018


def test_folders_without_a_processor_are_named(tmp_path):
    with pytest.raises(DataError, match=r"data.processor: .*nothing"):
        ModelProcessor(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=f"data.processor: no processor in '{tmp_path}'"):
        ModelProcessor(str(tmp_path))
