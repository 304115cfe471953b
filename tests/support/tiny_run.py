"""Complete run in a folder: tokenizer, models, images, rows, and the YAML that names them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from raymm.monitor.metrics import read_metrics
from raymm.storage.checkpoint import CheckpointStore
from tests.support import REPOSITORY
from tests.support.needs import RAY_FOLDER

# Steps of the run that many tests read.
STEPS = 12
CHATML = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> "
    "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
WORDS = "user assistant what is this a red green blue square dog cat it says and yes".split()
SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<image>"]
LLAMA = {
    "model_type": "llama", "vocab_size": len(SPECIAL) + len(WORDS), "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True,
}
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
}


def save_tokenizer(folder: Path) -> None:
    """Save a word-level tokenizer with a chat template."""
    names = [*SPECIAL, *WORDS]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<image>"], chat_template=CHATML,
    ).save_pretrained(folder)


def save_models(folder: Path) -> None:
    """Save pretrained folders ``llama`` and ``siglip``."""
    torch.manual_seed(7)
    values = {k: v for k, v in LLAMA.items() if k != "model_type"}
    LlamaForCausalLM(LlamaConfig(**values)).save_pretrained(folder / "llama")
    values = {k: v for k, v in SIGLIP.items() if k != "model_type"}
    SiglipVisionModel(SiglipVisionConfig(**values)).save_pretrained(folder / "siglip")


def save_rows(folder: Path, name: str, count: int, seed: int) -> None:
    """Save ``{name}.jsonl``: three rows with an image per row of text alone, with PNG files."""
    generator = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        words = " ".join(generator.choice(WORDS[6:], 2 + i % 4))
        messages = [
            {"role": "user", "content": "what is this"},
            {"role": "assistant", "content": words},
        ]
        row: dict[str, Any] = {"id": f"{name}-{i}", "messages": messages, "images": []}
        if i % 4:
            pixels = generator.integers(0, 256, (9, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{name}-{i}.png")
            row["images"] = [f"{name}-{i}.png"]
        rows.append(row)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(folder: Path) -> Path:
    """Fill a folder with all inputs of a run except its configuration."""
    save_tokenizer(folder / "tokenizer")
    save_models(folder)
    save_rows(folder, "train", 13, seed=0)
    save_rows(folder, "heldout", 6, seed=1)
    return folder


def settings(inputs: Path, run: Path, steps: int) -> dict[str, Any]:
    """Return a configuration: SigLIP from a folder, Llama from config values, all trained.

    The encoder shares a rank with the first of two language model stages.
    """
    return {
        "run": {
            "storage_path": str(run), "steps": steps, "checkpoint_every": 2, "log_every": 1,
            "seed": 3, "device": "cpu",
        },
        "model": {
            "language_model": {"config": dict(LLAMA)},
            "encoders": {"vision": {"path": str(inputs / "siglip"), "projector": "mlp"}},
        },
        "parallel": {
            "encoders": {"vision": {"ranks": [0]}},
            "language_model": {"pp": 2, "ranks": [0, 1]},
        },
        "data": {
            "train": str(inputs / "train.jsonl"),
            "tokenizer": str(inputs / "tokenizer"),
            "modalities": {
                "vision": {"column": "images", "processor": "tests.support.run_processors:image"}},
            "batch_size": 4, "microbatches": 2, "max_length": 32,
        },
        "optimizer": {
            "lr": 1.0e-2, "schedule": "cosine", "warmup_steps": 2, "total_steps": steps,
        },
        "resources": {"cpus": 0.25},
    }


def write_config(values: dict[str, Any], file: Path) -> str:
    """Write a configuration; return its path for the command line."""
    file.write_text(yaml.safe_dump(values))
    return str(file)


def change(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a value of a configuration in place; None for ``value`` removes the key."""
    *parents, last = path.split(".")
    for name in parents:
        values = values.setdefault(name, {})
    if value is None:
        del values[last]
    else:
        values[last] = value


def curve(run: Path) -> list[tuple]:
    """Return (step, loss, gradient norm, learning rate, label tokens) of every step, exactly."""
    return [
        (row["step"], row["loss"], row["grad_norm"], row["learning_rate"], row["label_tokens"])
        for row in read_metrics(run / "metrics.jsonl") if "loss" in row
    ]


def heldout_rows(run: Path) -> list[dict]:
    """Return the held-out evaluations of a run."""
    return [row for row in read_metrics(run / "metrics.jsonl") if "heldout_loss" in row]


def remove_checkpoints(run: Path, after: int) -> None:
    """Remove the checkpoints of a run after a step, so that it resumes from an earlier one."""
    for folder in CheckpointStore(run).committed():
        if folder.name > f"step-{after:08d}":
            shutil.rmtree(folder)


def checkpoint_tensors(run: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the last checkpoint, including optimizer state."""
    from safetensors.torch import load_file

    tensors = {}
    for file in sorted(CheckpointStore(run).latest().glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def child_environment(**extra: str) -> dict[str, str]:
    """Return the environment of a raymm process with an embedded Ray that can import test modules.
    """
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith("RAY_") or k == RAY_FOLDER
    }
    return {
        **environment,
        "PYTHONPATH": str(REPOSITORY),
        "RAY_ADDRESS": "local",
        # Otherwise Ray kills workers when other processes use up the machine's memory.
        "RAY_memory_monitor_refresh_ms": "0",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        **extra,
    }


def start(arguments: list[str], cwd: Path, log: Path, **extra: str) -> subprocess.Popen:
    """Start ``python -m raymm ...`` with its output in ``log``."""
    with open(log, "w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "raymm", *arguments], cwd=cwd, stdout=output,
            stderr=subprocess.STDOUT, env=child_environment(**extra), start_new_session=True,
        )
