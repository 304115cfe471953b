"""Rows with two answers and items: each becomes two rows of the model's own processor."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoProcessor

from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.errors import SampleError
from tests.raymm.data.loading.test_processed import config, first_step, picture, write
from tests.support.tiny_folders import tiny

TEXTS = ("A red one.", "A blue one, as always.")


def turn(role, *parts):
    return [{"role": role, "content": list(parts)}]


def said(text):
    return {"type": "text", "text": text}


def pair(number, image, *answers):
    chosen, rejected = (turn("assistant", said(text)) for text in answers or TEXTS)
    return {
        "id": f"row-{number}", "prompt": turn("user", {"type": "image"}, said("What is it?")),
        "chosen": chosen, "rejected": rejected, "images": [str(image)],
    }


def pairs(file, kind="gemma3", **more):
    values = {"preferences": True, "media_folders": ["/"], "batch_size": 2, "microbatches": 1}
    return config(kind, file, **{**values, **more})


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_rows_are_the_processors_with_labels_on_answers(kind, tmp_path):
    images = [picture(tmp_path, 60, 90), picture(tmp_path, 130, 70)]
    file = write(tmp_path, *(pair(number, image) for number, image in enumerate(images)))
    step = first_step(pairs(file, kind))
    (microbatch,), (meta,) = step.microbatches, step.meta
    assert meta.sample_ids == ("row-0:chosen", "row-0:rejected", "row-1:chosen", "row-1:rejected")
    assert len(microbatch["image_grid_thw" if kind == "qwen2_5_vl" else "pixel_values"]) == 4
    processor = AutoProcessor.from_pretrained(tiny(kind)[0])
    for index, text in enumerate(TEXTS * 2):
        prompt = turn("user", {"type": "image", "path": str(images[index // 2])},
                      said("What is it?"))  # fmt: skip
        own = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        before = processor.apply_chat_template([prompt], add_generation_prompt=True, **own)
        whole = processor.apply_chat_template([prompt + turn("assistant", said(text))], **own)
        length = meta.lengths[index]
        ids = microbatch["input_ids"][index, :length]
        assert torch.equal(ids, whole["input_ids"][0])
        labels = microbatch["labels"][index, :length]
        start = before["input_ids"].shape[1]
        assert (labels[:start] == IGNORE_INDEX).all() and torch.equal(ids[:start],
                                                                      before["input_ids"][0])
        learned = labels[labels != IGNORE_INDEX]
        assert torch.equal(learned, ids[start : start + len(learned)])
        assert processor.tokenizer.decode(learned).startswith(text)


def test_microbatches_keep_pairs_together(tmp_path):
    image = picture(tmp_path, 60, 90)
    file = write(tmp_path, *(pair(number, image) for number in range(4)))
    step = first_step(pairs(file, batch_size=4, microbatches=2))
    assert [meta.sample_ids for meta in step.meta] == [
        tuple(f"row-{n}:{name}" for n in rows for name in ("chosen", "rejected"))
        for rows in ((0, 1), (2, 3))
    ]


def test_an_unusable_answer_removes_its_pair(tmp_path):
    image = picture(tmp_path, 60, 90)
    file = write(tmp_path, pair(0, image), pair(1, image, "A red one.", "<image>"))
    step = first_step(pairs(file, on_error="skip"))
    assert step.meta[0].sample_ids == ("row-0:chosen", "row-0:rejected")
    assert [skipped.id for skipped in step.skipped] == ["row-1"]


def test_only_the_chosen_answer(tmp_path):
    image = picture(tmp_path, 60, 90)
    file = write(tmp_path, pair(0, image))
    both = first_step(pairs(file, batch_size=1)).microbatches[0]
    step = first_step(pairs(file, batch_size=1, preferences="chosen"))
    assert step.meta[0].sample_ids == ("row-0",)
    length = step.meta[0].lengths[0]
    for name in ("input_ids", "labels"):
        assert torch.equal(step.microbatches[0][name][0], both[name][0, :length])


@pytest.mark.parametrize(("preferences", "row", "says"), [
    (False, pair, "accepted: rows with messages or text"),
    (True, None, "accepted: rows with prompt, chosen and rejected"),
])  # fmt: skip
def test_other_rows_are_refused(tmp_path, preferences, row, says):
    image = picture(tmp_path, 60, 90)
    plain = {"id": "a", "messages": turn("user", said("a")) + turn("assistant", said("b"))}
    file = write(tmp_path, row(0, image) if row else plain)
    seen = {} if row else {"modalities": {}}
    with pytest.raises(SampleError, match=says):
        first_step(pairs(file, batch_size=1, preferences=preferences, **seen))


def test_answers_that_max_length_cuts_off(tmp_path):
    file = write(tmp_path, {"id": "a", "prompt": "a b c d e f", "chosen": " g", "rejected": " h"})
    with pytest.raises(SampleError, match=r"no label token among its first 3 tokens"):
        first_step(pairs(file, batch_size=1, max_length=3, modalities={}))
