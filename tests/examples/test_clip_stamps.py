"""The CLIP example on a few generated pictures learns them, like one process."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.multiplexed import clip_stamps

COLOURS = {"red": (220, 10, 10), "green": (10, 220, 10), "blue": (10, 10, 220),
           "grey": (120, 120, 120)}  # fmt: skip
SHAPES = {"bar": (60, 10), "square": (40, 40)}


@pytest.fixture
def data(tmp_path):
    """Return captioned pictures, one without, one caption twice; a tokenizer of words."""
    lines = []
    for colour, rgb in COLOURS.items():
        for shape, size in SHAPES.items():
            name = f"{colour}_{shape}.png"
            Image.new("RGB", size, rgb).save(tmp_path / name)
            lines.append({"images": [name], "messages": [
                {"role": "user", "content": "What is it?"},
                {"role": "assistant", "content": f"a {colour} {shape}"},
            ]})
    lines += [lines[0], {"images": [], "messages": lines[0]["messages"]}]
    text = "\n".join(json.dumps(line) for line in lines)
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text(text)
    words = ["[UNK]", "a", *COLOURS, *SHAPES]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "words")
    return tmp_path


def test_pairs_and_captions(data):
    pairs = clip_stamps.read_pairs(data / "train.jsonl", 100)
    assert len(pairs) == 8 and pairs[0] == (data / "red_bar.png", "a red bar")
    captions = clip_stamps.Captions(data / "words", pairs[:2])
    assert captions.size == 3 + len({"a", "red", "bar", "square"})
    batch = captions.encode(["a red bar", "a green bar"])  # green was not in the data
    assert batch["attention_mask"].sum(1).tolist() == [5, 4]
    ids = batch["input_ids"]
    assert ids.shape == (2, clip_stamps.MAX_TOKENS)
    assert ids[1, 1] == ids[0, 1] and ids[1, 2] == ids[0, 3]


def test_batches_go_through_the_data():
    data = {"input_ids": torch.arange(6), "pixel_values": torch.arange(6) * 10}
    found = list(clip_stamps.batches(data, 3, 4, seed=0))
    assert all(torch.equal(b["pixel_values"], 10 * b["input_ids"]) for b in found)
    for a, b in (found[:2], found[2:]):
        assert sorted([*a["input_ids"].tolist(), *b["input_ids"].tolist()]) == list(range(6))


def test_the_loss_goes_down(data, ray_cluster):
    losses = clip_stamps.main([
        "--data", str(data), "--tokenizer", str(data / "words"), "--steps", "12",
        "--batch-size", "7", "--lr", "2e-3",
    ])
    pairs = clip_stamps.read_pairs(data / "train.jsonl", 100)
    captions = clip_stamps.Captions(data / "words", pairs)
    model = clip_stamps.build_model(captions.size, seed=0).eval()
    batch = clip_stamps.load_batch(pairs[:7], captions)
    with torch.no_grad():
        due = model(**batch, return_loss=True).loss.item()
    assert losses["heldout"][0] == pytest.approx(due, rel=1e-5)
    assert len(losses["train"]) == 12
    assert losses["heldout"][1] < 0.8 * losses["heldout"][0]
