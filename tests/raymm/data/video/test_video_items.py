"""Video files as items of models of parts and of VLMs, with errors of the sample."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from examples.vlm import tiny
from raymm.data import DataConfig, StepBuilder, local_steps, open_split, scan
from raymm.errors import ConfigError, SampleError
from tests.support import clips

VIDEO = {"column": "clips", "processor": "tests.support.media_processors:from_clip",
    "video": {"max_frames": 4}}
SOUND = {"column": "clips", "processor": "tests.support.media_processors:track"}
clip = functools.cache(clips.make_clip)


def write(folder: Path, files: dict[str, bytes], content: str = "what is this") -> Path:
    """Write rows of one clip each."""
    rows = []
    for name, data in files.items():
        (folder / name).write_bytes(data)
        rows.append({"id": name.partition(".")[0], "clips": name, "messages": [
            {"role": "user", "content": content}, {"role": "assistant", "content": "a red cat"},
        ]})  # fmt: skip
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def config(tmp_path, tokenizer_dir):
    def make(files, modalities, **more) -> DataConfig:
        return DataConfig(**{
            "train": str(write(tmp_path, files)), "tokenizer": tokenizer_dir, "shuffle": False,
            "modalities": modalities, "batch_size": len(files), "microbatches": 1, **more,
        })  # fmt: skip

    return make


def test_pictures_and_sound_of_the_same_file_are_two_modalities(config):
    files = {"a.mp4": clip(sound=True), "b.webm": clip("webm", frames=60, sound=True)}
    settings = config(files, {"video": VIDEO, "audio": SOUND})
    microbatch = next(local_steps(settings, steps=1)).microbatches[0]
    assert microbatch["video"]["pixel_values_videos"].shape == (2, 4, 3, 8, 8)
    assert torch.allclose(microbatch["video"]["times"], torch.tensor(
        [[0, 0.4, 0.8, 1.2], [0, 0.6, 1.2, 1.8]], dtype=torch.float64), atol=0.021)  # fmt: skip
    sound = microbatch["audio"]["input_features"]
    assert sound.shape == (2, 8000)
    for item in sound.numpy():
        spectrum = np.abs(np.fft.rfft(item * np.hanning(8000)))
        assert np.argmax(spectrum) == round(clips.TONE / 2)
    sizes = scan(open_split(settings, "train"), settings)
    assert sizes.items["video"].tolist() == [[64, 48, 4]] * 2
    assert sizes.items["audio"][:, 1].tolist() == [16_000, 48_000]


def test_frames_go_to_an_image_processor(config, tmp_path):
    from transformers import CLIPImageProcessorPil

    CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}) \
        .save_pretrained(tmp_path / "clip")  # fmt: skip
    settings = config(
        {"a.mp4": clip()},
        {"video": {**VIDEO, "processor": str(tmp_path / "clip"), "video": {"fps": 5}}},
    )
    pixels = next(local_steps(settings, steps=1)).microbatches[0]["video"]["pixel_values"]
    assert pixels.shape == (1, 8, 3, 8, 8)
    assert (pixels[0, 1:] != pixels[0, :-1]).flatten(1).any(1).all()


def test_wrong_videos_are_errors_of_the_sample(config):
    good = clip()
    files = {
        "good.mp4": good, "truncated.mp4": good[: len(good) // 2], "empty.mp4": b"",
        "zero.avi": clip("avi", 0), "none.mp4": b"no video" * 40,
        "long.mp4": clip(frames=100), "picture.jpg": b"\xff\xd8\xff",
    }  # fmt: skip
    settings = config(files, {"video": VIDEO}, on_error="skip", max_video_seconds=3)
    step = next(local_steps(settings, steps=1))
    assert step.meta[0].sample_ids == ("good",)
    reasons = {skipped.id: skipped.reason for skipped in step.skipped}
    assert {skipped.column for skipped in step.skipped} == {"clips"}
    assert "cut off" in reasons["truncated"] and "empty" in reasons["empty"]
    assert "no duration" in reasons["zero"] and "it is not an MP4" in reasons["none"]
    assert "above data.max_video_seconds (3)" in reasons["long"]
    assert "cannot be read" in reasons["picture"]
    settings.on_error = "raise"
    with pytest.raises(SampleError, match=r"'truncated'.*column 'clips', file .*truncated.mp4"):
        next(local_steps(settings, steps=1))
    silent = settings.model_copy(update={"modalities": config(files, {"a": SOUND}).modalities})
    with pytest.raises(SampleError, match="'good'.*no sound track"):
        StepBuilder(silent, open_split(silent, "train")).build([0])


def test_settings(config, monkeypatch):
    files = {"a.mp4": clip()}
    with pytest.raises(ValueError, match="video and frames are both given"):
        config(files, {"video": {**VIDEO, "frames": True}})
    with pytest.raises(ValueError, match="accepted with video: 'file'"):
        config(files, {"video": {**VIDEO, "input": "bytes"}})
    with pytest.raises(ValueError, match="fps"):
        config(files, {"video": {**VIDEO, "video": {"fps": 0}}})
    assert config(files, {"video": {**VIDEO, "video": True}}).modalities["video"].video is not None
    monkeypatch.setitem(sys.modules, "av", None)
    from raymm.data import check_data

    with pytest.raises(ConfigError, match=r"modalities.video.video needs .* av.*\[video\]"):
        check_data(config(files, {"video": VIDEO}))


def test_a_step_of_videos_equals_the_processor(tmp_path):
    folder, _ = tiny.make("qwen3_vl", tmp_path / "model", 1)
    processor = AutoProcessor.from_pretrained(folder)  # whose template supports pictures alone
    processor.chat_template = processor.chat_template.replace("image_pad", "video_pad")
    processor.save_pretrained(folder)
    settings = DataConfig(
        train=str(write(tmp_path, {"a.mp4": clip()}, "<video>what is this")), shuffle=False,
        processor=str(folder), batch_size=1, microbatches=1, max_length=4096,
        modalities={"video": {"column": "clips", "video": {"fps": 5}}},
    )
    microbatch = next(local_steps(settings, steps=1)).microbatches[0]
    text = processor.tokenizer.decode(microbatch["input_ids"][0])
    assert microbatch["video_grid_thw"].tolist()[0][0] == 4
    assert "<0.1 seconds>" in text and "<0.5 seconds>" in text and "<1.3 seconds>" in text
