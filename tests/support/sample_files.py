"""Small real tokenizer, and small real PNG, WAV and JSONL files."""

import json
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> \n "
    "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
WORDS = "user assistant system what is this a cat dog red blue says it of and yes".split()


def build_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    names = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "\n", *WORDS]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "removed")  # keeps "\n" as a token
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    )


def write_image(path: Path, seed: int, size=(12, 9)) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_sound(path: Path, seed: int) -> None:
    wave = np.random.default_rng(seed).uniform(-0.5, 0.5, 400).astype(np.float32)
    soundfile.write(path, wave, 16000)


def write_rows(folder: Path, count: int) -> list[dict]:
    """Write ``train.jsonl``: rows that cycle through text, image, audio, both, and two images."""
    rows = []
    for i in range(count):
        row = {"id": f"s{i}", "images": [], "audio": None}
        kind = i % 5
        if kind in (1, 3, 4):
            names = [f"i{i}.png"] + ([f"i{i}b.png"] if kind == 4 else [])
            for k, name in enumerate(names):
                write_image(folder / name, 10 * i + k)
            row["images"] = names
        if kind in (2, 3):
            write_sound(folder / f"a{i}.wav", i)
            row["audio"] = f"a{i}.wav"
        if kind == 0:
            row["text"] = "a cat is a dog " * (1 + i % 3)
        else:
            row["messages"] = [
                {"role": "user", "content": "what is this"},
                {"role": "assistant", "content": "a red cat " * (1 + i % 4)},
            ]
        rows.append(row)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows
