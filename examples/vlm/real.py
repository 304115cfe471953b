"""A real vision-language model from two pretrained ones, and questions to train it on:

    python -m examples.vlm.real --to vlm
    raymm train --model vlm/model --data vlm/train.jsonl

SmolLM2-135M reads, EfficientNet-Lite0 sees, and the class is transformers' FastVLM, whose tower is
a convolutional one, too. Only the projector between them is new.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    FastVlmConfig,
    FastVlmForConditionalGeneration,
    LlavaImageProcessorPil,
    LlavaProcessor,
)
from transformers.utils import logging

from examples.alignment import processors
from examples.alignment.cache import Cache, default_root
from examples.alignment.packages import DownloadError
from examples.alignment.prepare import DATA_STEPS, MODEL_STEPS, prepare
from examples.vlm import efficientnet
from examples.vlm.stamp_questions import write_questions
from examples.vlm.tiny import TEMPLATE

IMAGE_SIZE = 160  # pixels of a side: a picture is 25 tokens
IMAGE_TOKEN = "<image>"
_MULTIPLE = 128  # of the vocabulary, so that tensor parallelism can shard it
_LANGUAGE, _VISION = "models/smollm2-135m", "models/efficientnet-lite0"
_STAMPS = "data/stamps"
FILES = "model/config.json", "train.jsonl", "heldout.jsonl", "images"


def assemble(cache: Path, folder: Path, seed: int = 0) -> FastVlmForConditionalGeneration:
    """Write the model's folder: weights, configuration, processor and chat template.

    Args:
        cache: what ``examples.alignment.prepare`` filled.
        folder: gets them.
        seed: of the projector.

    Returns:
        The model, in fp32.
    """
    logging.disable_progress_bar()
    language = AutoModelForCausalLM.from_pretrained(cache / _LANGUAGE)
    tokenizer = AutoTokenizer.from_pretrained(cache / _LANGUAGE)
    tokenizer.add_special_tokens({"extra_special_tokens": [IMAGE_TOKEN]})
    text = language.config
    text.name_or_path = ""
    text.vocab_size = -(-len(tokenizer) // _MULTIPLE) * _MULTIPLE
    side = IMAGE_SIZE // efficientnet.STRIDE
    torch.manual_seed(seed)
    model = FastVlmForConditionalGeneration(FastVlmConfig(
        vision_config=efficientnet.config(IMAGE_SIZE), text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN), image_seq_length=side**2,
        tie_word_embeddings=True,
    ))  # fmt: skip
    model.model.vision_tower.load_state_dict(
        efficientnet.state_dict(load_file(cache / _VISION / "model.safetensors"), IMAGE_SIZE)
    )
    state = language.model.state_dict()
    state["embed_tokens.weight"] = _longer(state["embed_tokens.weight"], text.vocab_size)
    model.model.language_model.load_state_dict(state)
    model.tie_weights()
    model.generation_config = language.generation_config
    model.save_pretrained(folder)
    _processor(tokenizer).save_pretrained(folder)
    return model.eval()


def _longer(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Embeddings of tokens that are new are the mean of those that are there."""
    new = rows.mean(0, keepdim=True).expand(length - len(rows), -1)
    return torch.cat([rows, new])


def _processor(tokenizer) -> LlavaProcessor:
    mean, scale = (value / 255 for value in (processors.IMAGE_MEAN, processors.IMAGE_SCALE))
    images = LlavaImageProcessorPil(  # which needs no torchvision
        size={"shortest_edge": IMAGE_SIZE}, do_pad=True,
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        image_mean=[mean] * 3, image_std=[scale] * 3,
    )
    return LlavaProcessor(
        images, tokenizer, patch_size=efficientnet.STRIDE, vision_feature_select_strategy="full",
        chat_template=TEMPLATE.replace("ITEM", IMAGE_TOKEN), image_token=IMAGE_TOKEN,
    )


def make(cache: Cache, to: Path, console: Console) -> Path:
    """Write ``model/``, ``train.jsonl``, ``heldout.jsonl`` and ``images/`` into a folder, which is
    whole once it is there; one that is there is left alone.

    Raises:
        ValueError: what is there is something else.
        DownloadError, ValueError, OSError: as from :func:`examples.alignment.prepare.prepare`.
    """
    if to.exists():
        if missing := [name for name in FILES if not (to / name).exists()]:
            raise ValueError(
                f"{to} is there and was not made by this: it has no {', '.join(missing)}; give a "
                "folder that is not there yet"
            )
        console.print(f"ready: {to}", highlight=False, soft_wrap=True)
        return to
    prepare(cache, (DATA_STEPS["stamps"], *MODEL_STEPS[:2]), console)
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=to.parent) as temporary:
        new = Path(temporary) / "new"
        model = assemble(cache.root, new / "model")
        counts = write_questions(cache.root / _STAMPS, new)
        new.rename(to)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    console.print(
        f"made {to}: {type(model).__name__}, {millions:.1f} M parameters, fp32; questions: "
        f"{counts['train']} to train on, {counts['heldout']} held out",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return to


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.vlm.real", description="A real model of pictures and text."
    )
    parser.add_argument("--to", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--cache", type=Path, help="of packages (default: as `make train` has it)")
    options = parser.parse_args(arguments)
    try:
        make(Cache(options.cache or default_root()), options.to, Console())
    except (DownloadError, ValueError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
