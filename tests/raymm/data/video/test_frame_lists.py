"""Lists of frames as videos: their times are given, or rejected if the model needs times."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor

from examples.vlm.kinds import KINDS
from raymm.data import Clip, DataConfig, local_steps
from raymm.data.samples.folders import MediaFolders
from raymm.data.samples.media import TimedFrames
from raymm.data.samples.row_media import MediaRules, PartMedia
from raymm.errors import SampleError
from tests.support.tiny_folders import tiny

VIDEO_KINDS = [kind for kind, spec in KINDS.items() if "video_processor" in spec.parts]
# Processors that write times into the text, or positions.
TIMED = ("qwen2_5_vl", "qwen3_vl", "smolvlm")


def files(tmp_path, kind, frames=4, sizes=((56, 56),)):
    """Return a folder of a processor with a video template, and a file with a list of frames."""
    folder = tmp_path / "processor"
    processor = AutoProcessor.from_pretrained(tiny(kind)[0])
    item = KINDS[kind].item
    video = {
        "<|vision_start|><|image_pad|><|vision_end|>": "<|vision_start|><|video_pad|><|vision_end|>"
    }.get(item, "<video>")
    processor.chat_template = processor.chat_template.replace(repr(item)[1:-1], video)
    processor.save_pretrained(folder)
    names = []
    for number in range(frames):
        name = f"{number}.png"
        size = sizes[number % len(sizes)]
        Image.new("RGB", size, (40 * number, 0, 0)).save(tmp_path / name)
        names.append(name)
    row = {"id": "row", "video": [names], "messages": [
        {"role": "user", "content": "<video>What is in the picture?"},
        {"role": "assistant", "content": "A red circle."},
    ]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def microbatch(tmp_path, folder, **video):
    config = DataConfig.model_validate({
        "train": str(tmp_path / "rows.jsonl"), "processor": str(folder), "batch_size": 1,
        "microbatches": 1, "max_length": 4096,
        "modalities": {"video": {"column": "video", "frames": True, **video}},
    })
    return next(local_steps(config, steps=1)).microbatches[0]


@pytest.mark.parametrize("kind", VIDEO_KINDS)
def test_frames_without_a_rate_are_refused_by_timed_models(kind, tmp_path):
    folder = files(tmp_path, kind)
    if kind not in TIMED:
        assert microbatch(tmp_path, folder)["input_ids"].numel()
        return
    with pytest.raises(SampleError, match=r"list of 4 frames without times.*video\.fps"):
        microbatch(tmp_path, folder)


@pytest.mark.parametrize("kind", VIDEO_KINDS)
def test_frames_with_a_rate_equal_the_processor(kind, tmp_path):
    folder = files(tmp_path, kind)
    made = microbatch(tmp_path, folder, fps=2)
    processor = AutoProcessor.from_pretrained(folder)
    frames = np.stack([np.asarray(Image.open(tmp_path / f"{n}.png")) for n in range(4)])
    text = processor.apply_chat_template(
        [{"role": "user", "content": [
            {"type": "video"}, {"type": "text", "text": "What is in the picture?"}]},
         {"role": "assistant", "content": [{"type": "text", "text": "A red circle."}]}],
        tokenize=False,
    )  # fmt: skip
    due = processor(
        text=[text], videos=[frames], return_tensors="pt", do_sample_frames=False,
        video_metadata=[{
            "total_num_frames": 4, "fps": 2.0, "duration": 2.0, "frames_indices": [0, 1, 2, 3],
            "height": 56, "width": 56,
        }],
    )
    assert made.keys() == {*due, "labels"}
    for name, value in due.items():
        assert np.array_equal(made[name], value), name
    if kind == "qwen3_vl":
        written = processor.tokenizer.decode(made["input_ids"][0])
        assert "<0.2 seconds>" in written and "<1.2 seconds>" in written


@pytest.mark.parametrize("timing", [{"fps": 2}, {"times": [0, 0.5, 1, 1.5]}])
def test_a_part_of_a_message_gives_the_times_of_its_frames(timing, tmp_path):
    folder = files(tmp_path, "qwen3_vl")
    due = microbatch(tmp_path, folder, fps=2)
    part = {"type": "video", "video": [f"{number}.png" for number in range(4)], **timing}
    row = {"messages": [
        {"role": "user", "content": [
            part, {"type": "text", "text": "What is in the picture?"}]},
        {"role": "assistant", "content": "A red circle."},
    ]}  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    made = microbatch(tmp_path, folder, column=None, frames=False)
    assert made.keys() == due.keys()
    assert all(np.array_equal(made[name], value) for name, value in due.items())


@pytest.mark.parametrize(("timing", "said"), [
    ({"fps": 0}, "fps 0; accepted: frames per second"),
    ({"fps": "2"}, "fps '2'; accepted"),
    ({"times": [0, 1]}, "number of seconds for each of its 3 frames"),
    ({"fps": 2, "times": [0, 1, 2]}, "fps and times; accepted: one of them"),
])  # fmt: skip
def test_impossible_times_of_a_part_are_refused(timing, said, tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.png").touch()
    rules = MediaRules(MediaFolders(str(tmp_path), ()), parts={"video": "video"})
    part = {"type": "video", "video": ["0.png", "1.png", "2.png"], **timing}
    with pytest.raises(SampleError, match=said):
        PartMedia(rules, "messages").take([{"role": "user", "content": [part]}])


def test_times_survive_between_processes():
    frames = TimedFrames(["a.png", "b.png"], [0.0, 0.5])
    again = pickle.loads(pickle.dumps(frames))  # noqa: S301
    assert again == frames and again.times == (0.0, 0.5)


def test_a_single_frame_needs_no_rate(tmp_path):
    assert microbatch(tmp_path, files(tmp_path, "smolvlm", frames=1))["input_ids"].numel()


def test_pictures_without_frames_are_not_videos(tmp_path):
    """Treat a list without ``frames`` as several items; each would be a video of one frame."""
    folder = files(tmp_path, "smolvlm", frames=1)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text().replace('[["0.png"]]', '["0.png"]'))
    with pytest.raises(SampleError, match="is a picture, not a video file.*frames: true"):
        microbatch(tmp_path, folder, frames=False)


def test_frames_of_several_sizes_are_refused(tmp_path):
    folder = files(tmp_path, "qwen3_vl", sizes=((56, 56), (64, 56)))
    with pytest.raises(SampleError, match="different sizes: 56 x 56 and 64 x 56"):
        microbatch(tmp_path, folder, fps=2)


def test_times_of_frames_become_numbers_and_a_rate():
    frames = [np.zeros((2, 2, 3), np.uint8)] * 3
    even = Clip.from_frames(frames, [0.0, 0.5, 1.0])
    assert (even.rate, even.seconds, even.total) == (2.0, 1.5, 3)
    assert even.indices.tolist() == [0, 1, 2]
    uneven = Clip.from_frames(frames, [0.25, 0.5, 1.1])
    assert np.allclose(uneven.indices / uneven.rate, [0.25, 0.5, 1.1])
    for times, said in (([0, 1], "3 frames and 2 times"), ([0, 2, 1], "each later than")):
        with pytest.raises(SampleError, match=said):
            Clip.from_frames(frames, times)


@pytest.mark.parametrize(("values", "said"), [
    ({"modalities": {"image": {"column": "a", "fps": 2}}}, "image.fps is given"),
    ({"modalities": {"video": {"column": "a", "fps": 0}}}, "greater than 0"),
])
def test_a_rate_is_of_videos(values, said):
    with pytest.raises(ValueError, match=said):
        DataConfig.model_validate({
            "train": "rows.jsonl", "processor": "folder", "batch_size": 1, "microbatches": 1,
            **values,
        })
