"""Microbatches of a model's own processor.

Tensors are those of the processor's call, and labels those of a slow oracle that processes the
conversation up to every turn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from benchmarks.shared.templates import SHAPES
from examples.vlm.kinds import KINDS
from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.data import DataConfig, local_steps, open_split, step_builder
from raymm.errors import DataError, SampleError
from tests.support.tiny_folders import modalities, tiny


def config(kind, data=None, **more):
    folder, file = tiny(kind)
    values = {
        "train": str(data or file), "processor": folder, "modalities": modalities(kind),
        "batch_size": 6, "microbatches": 2, "shuffle": False,
    }
    return DataConfig(**{**values, **more})


def first_step(config):
    return next(iter(local_steps(config, steps=1)))


def row(number, *turns, images=()):
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)
    ]
    return {"id": f"row-{number}", "messages": messages, "images": list(map(str, images))}


def write(folder: Path, *rows) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def picture(folder: Path, width: int, height: int) -> Path:
    path = folder / f"{width}x{height}.png"
    Image.new("RGB", (width, height), "red").save(path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_equal_the_processors_output(kind):
    settings = config(kind)
    processor = AutoProcessor.from_pretrained(settings.processor)
    builder: Any = step_builder(settings, open_split(settings, "train"))
    step = first_step(settings)
    rows = [json.loads(line) for line in Path(settings.train[0].path).read_text().splitlines()]
    by_id = {row["id"]: row for row in rows}
    for microbatch, meta in zip(step.microbatches, step.meta, strict=True):
        samples = [builder.encode(builder.dataset[rows.index(by_id[i])]) for i in meta.sample_ids]
        media = {
            "images": [list(sample.media.get("image", ())) for sample in samples],
            "audio": [item for sample in samples for item in sample.media.get("audio", ())],
        }
        given = {name: items for name, items in media.items() if any(map(len, items))}
        due = processor(
            text=[sample.text for sample in samples], return_tensors="pt", padding=True,
            padding_side="right", **given,
            **({"sampling_rate": 16_000} if media["audio"] else {}),
        )
        assert microbatch.keys() == {*due, "labels"}
        for name, value in due.items():
            assert torch.equal(microbatch[name], value), name
        for index, sample_id in enumerate(meta.sample_ids):
            labels = microbatch["labels"][index]
            said = processor.tokenizer.decode(labels[labels != IGNORE_INDEX])
            assert said == by_id[sample_id]["messages"][-1]["content"] + "<|im_end|>\n"


def oracle(builder, conversation, messages):
    """Return labels from the conversation processed up to the start and the end of every turn."""
    def ids(count, prompt):
        text, _ = builder.processor.template.render(messages[:count], prompt)
        items = sum(
            part["type"] == "image" for message in messages[:count] for part in message["content"]
        )
        tensors = builder.processor([text], [{"image": conversation.media["image"][:items]}])
        return tensors["input_ids"][0].tolist()

    every = ids(len(messages), False)
    labels = [IGNORE_INDEX] * len(every)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start, stop = len(ids(number, True)), len(ids(number + 1, False))
            labels[start:stop] = every[start:stop]
    return labels


def test_turns_between_images_are_found(tmp_path):
    first, second = picture(tmp_path, 60, 90), picture(tmp_path, 130, 70)
    image, text = {"type": "image"}, {"type": "text", "text": "And this?"}
    file = write(tmp_path, row(
        0, [image, text], "A red one.", [text, image, text], "A red one, too.", "Sure?", "Yes.",
        images=[first, second],
    ), row(1, "<image>What is it?", "A<image> is in the text.", images=[first]))  # fmt: skip
    settings = config("idefics3", file, batch_size=1, microbatches=1)
    settings.media_folders.append("/")
    builder: Any = step_builder(settings, open_split(settings, "train"))
    conversation = builder.encode(builder.dataset[0])
    messages = [
        {**m, "content": [{"type": "text", "text": m["content"]}]}
        if isinstance(m["content"], str) else m
        for m in builder.dataset[0].messages or ()
    ]  # fmt: skip
    labels = builder.build([0]).microbatches[0]["labels"][0].tolist()
    assert labels == oracle(builder, conversation, messages)
    assert sum(label != IGNORE_INDEX for label in labels) > 10
    with pytest.raises(SampleError, match="places for 2 items of kind 'image', but the row has 1"):
        builder.encode(builder.dataset[1])


def test_text_with_marks_equals_parts(tmp_path):
    path = picture(tmp_path, 60, 90)
    file = write(
        tmp_path, row(0, "<image>What?", "This.", images=[path]),
        row(1, [{"type": "image"}, {"type": "text", "text": "What?"}], "This.", images=[path]),
    )
    settings = config("gemma3", file, batch_size=2, microbatches=2, media_folders=["/"])
    one, other = first_step(settings).microbatches
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_items_unsupported_by_the_processor_are_refused(tmp_path):
    path = picture(tmp_path, 60, 90)
    file = write(tmp_path, row(0, "<image>What?", "This.", images=[path]))
    processor = AutoProcessor.from_pretrained(tiny("qwen2_audio")[0])
    processor.chat_template = SHAPES["qwen2_audio"].template  # it skips the parts of other kinds
    processor.save_pretrained(tmp_path / "processor")
    settings = config(
        "qwen2_audio", file, processor=str(tmp_path / "processor"),
        modalities={"image": {"column": "images"}},
    )
    with pytest.raises(SampleError, match="1 item of kind 'image'.*not accept; accepted: audio"):
        step_builder(settings, open_split(settings, "train")).build([[0]])


def test_unusable_samples_are_named_and_can_be_skipped(tmp_path):
    path = picture(tmp_path, 60, 90)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    file = write(
        tmp_path, row(0, "<image>What?", "This.", images=[path]),
        row(1, "<image>What?", "This.", images=[broken]),
        row(2, "<image>One?", "No.", images=[path] * 2),
        row(3, "<image>" + "Long. " * 300, "This.", images=[path]),
    )
    settings = config(
        "gemma3", file, batch_size=4, microbatches=1, media_folders=["/"], on_error="skip",
        max_length=64,
    )
    step = first_step(settings)
    assert step.meta[0].sample_ids == ("row-0",)
    reasons = {skipped.id: skipped.reason for skipped in step.skipped}
    assert reasons.keys() == {"row-1", "row-2", "row-3"}
    assert "cannot be read" in reasons["row-1"]
    assert "places for 1 item of kind 'image', but the row has 2" in reasons["row-2"]
    assert "max_length" in reasons["row-3"]
    settings.on_error = "raise"
    with pytest.raises(SampleError, match="row-1"):
        first_step(settings)


def test_impossible_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"budgets\.video is given, but with rebalance"):
        config(
            "gemma3", modalities={"image": {"column": "images"}, "video": {"column": "videos"}},
            shuffle=True, batching={"method": "balanced", "rebalance": 5, "budgets": {"video": 90}},
        )
    with pytest.raises(ValueError, match="accepted with a processor: image, video, audio"):
        config("gemma3", modalities={"vision": {"column": "images"}})
    with pytest.raises(ValueError, match="accepted with data.processor: neither"):
        config("gemma3", modalities={"image": {"column": "images", "processor": "a:b"}})
    with pytest.raises(DataError, match="not a local folder"):
        first_step(config("gemma3", processor="no/such/folder"))
    with pytest.raises(DataError, match="no processor in"):
        first_step(config("gemma3", processor=str(tmp_path)))
