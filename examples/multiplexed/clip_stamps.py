"""Train a Hugging Face CLIP on pictures and their captions, its towers side by side.

    python -m examples.alignment.prepare        # once: pictures with captions, a tokenizer
    python -m examples.multiplexed.clip_stamps --steps 60

Two processes. The vision tower has a replica on both, on seven tenths of each GPU; the text tower
runs on the other three tenths of the second GPU; the contrastive loss compares all samples
with all. Without a GPU shares limit nothing, but everything else is the same: the loss is that of
``CLIPModel`` in one process, to the last digits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from transformers import AutoTokenizer, CLIPConfig, CLIPModel

from examples.alignment.cache import default_root
from examples.alignment.processors import load_image
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.layout.mapping_plan import plan_of_mapping
from raymm.model.contrastive import clip_dag
from raymm.runtime.parallel_model import ParallelModel
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage, Placement

IMAGE_SIZE = 56  # pixels, both sides: a quarter of what the processor gives
MAX_TOKENS = 32
START, END, PAD, FIRST = 0, 1, 2, 3  # token ids; words of the training captions follow

# In tenths of a GPU. Seconds are not known: nothing was measured.
MAPPING = Mapping(2, 10, (MultiplexStage(
    (Placement("image", (0, 1), 7), Placement("text", (1,), 3)), 0.0
),))


class Pair(NamedTuple):
    """A picture's file, and what it shows."""

    image: Path
    caption: str


def read_pairs(path: Path, limit: int) -> list[Pair]:
    """Pictures with captions of a data file, each caption once: the same caption twice in a
    batch would be a wrong negative."""
    found: dict[str, Pair] = {}
    for line in path.read_text().splitlines():
        sample = json.loads(line)
        if sample["images"]:
            caption = sample["messages"][-1]["content"]
            found.setdefault(caption, Pair(path.parent / sample["images"][0], caption))
    return list(found.values())[:limit]


class Captions:
    """Captions as token ids of a small vocabulary: that of the training captions."""

    def __init__(self, tokenizer_folder: Path, pairs: Sequence[Pair]) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(
            tokenizer_folder, local_files_only=True, trust_remote_code=False
        )
        known = {token for pair in pairs for token in self._tokens(pair.caption)}
        self._ids = {token: FIRST + i for i, token in enumerate(sorted(known))}

    @property
    def size(self) -> int:
        """Number of tokens in the vocabulary."""
        return FIRST + len(self._ids)

    def _tokens(self, caption: str) -> list[int]:
        return self._tokenizer(caption)["input_ids"][: MAX_TOKENS - 2]

    def encode(self, captions: Sequence[str]) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``attention_mask`` (B, MAX_TOKENS); unknown tokens are left out."""
        rows = [
            [START, *(self._ids[t] for t in self._tokens(one) if t in self._ids), END]
            for one in captions
        ]
        ids = torch.tensor([row + [PAD] * (MAX_TOKENS - len(row)) for row in rows])
        lengths = torch.tensor([[len(row)] for row in rows])
        return {"input_ids": ids, "attention_mask": (torch.arange(MAX_TOKENS) < lengths).long()}


def load_batch(pairs: Sequence[Pair], captions: Captions) -> dict[str, torch.Tensor]:
    """Return the inputs of CLIP for these pairs."""
    pixels = torch.stack([load_image(pair.image)["pixel_values"] for pair in pairs])
    small = F.avg_pool2d(pixels, pixels.shape[-1] // IMAGE_SIZE)
    return {"pixel_values": small, **captions.encode([pair.caption for pair in pairs])}


def batches(
    data: dict[str, torch.Tensor], size: int, steps: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Random batches; in every epoch each sample at most once."""
    generator = torch.Generator().manual_seed(seed)
    count = len(data["input_ids"])
    order: list[int] = []
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(count, generator=generator).tolist()
        chosen, order = order[:size], order[size:]
        yield {name: tensor[chosen] for name, tensor in data.items()}


def build_model(vocabulary: int, seed: int) -> CLIPModel:
    """A small CLIP with random weights."""
    torch.manual_seed(seed)
    layers = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4}
    return CLIPModel(CLIPConfig(
        vision_config={**layers, "num_hidden_layers": 3, "image_size": IMAGE_SIZE,
                       "patch_size": 8},
        text_config={**layers, "num_hidden_layers": 2, "vocab_size": vocabulary,
                     "max_position_embeddings": MAX_TOKENS, "bos_token_id": START,
                     "eos_token_id": END, "pad_token_id": PAD},
        projection_dim=64,
    ))  # fmt: skip


def at_least(least: int) -> Callable[[str], int]:
    """Return a type for integer options that rejects smaller numbers."""

    def read(given: str) -> int:
        if not given.isdecimal() or int(given) < least:
            raise argparse.ArgumentTypeError(
                f"is {given!r}; accepted: a whole number, at least {least}"
            )
        return int(given)

    return read


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cache = default_root()
    found.add_argument("--data", type=Path, default=cache / "data" / "stamps")
    found.add_argument("--tokenizer", type=Path, default=cache / "models" / "smollm2-135m")
    found.add_argument("--steps", type=at_least(1), default=60)
    found.add_argument("--batch-size", type=at_least(2), default=48)
    found.add_argument("--samples", type=at_least(2), default=480, help="training pairs to read")
    found.add_argument("--lr", type=float, default=1e-3)
    found.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return found.parse_args(given)


def main(given: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Train; returns the losses of all steps, and of held-out pairs before and after."""
    options, console = arguments(given), Console()
    train = read_pairs(options.data / "train.jsonl", options.samples)
    if len(train) < options.batch_size:
        raise SystemExit(
            f"--batch-size is {options.batch_size}, but {len(train)} pairs were read; accepted: 2 "
            f"to {len(train)}, or more --samples if the data have them"
        )
    heldout = read_pairs(options.data / "heldout.jsonl", options.batch_size)
    captions = Captions(options.tokenizer, train)
    console.print(f"{len(train)} pairs, {captions.size} tokens; held out: {len(heldout)} pairs")
    data, unseen = load_batch(train, captions), load_batch(heldout, captions)
    optimizer = OptimizerConfig(
        lr=options.lr, schedule="cosine", warmup_steps=min(10, options.steps),
        total_steps=options.steps,
    )
    dag = clip_dag(build_model(captions.size, seed=0))
    found: dict[str, list[float]] = {"train": [], "heldout": []}
    plan = plan_of_mapping(dag, MAPPING)
    with ParallelModel(dag, plan, optimizer=optimizer, device=options.device) as running:
        found["heldout"].append(running.evaluate(unseen).loss)
        for step, batch in enumerate(batches(data, options.batch_size, options.steps, seed=0)):
            output = running.train_step(batch)
            found["train"].append(output.loss)
            if step % 10 == 0 or step == options.steps - 1:
                seconds = output.timeline.makespan
                console.print(f"step {step}: loss {output.loss:.4f}, {seconds:.2f} s")
        found["heldout"].append(running.evaluate(unseen).loss)
    before, after = found["heldout"]
    console.print(f"held-out loss: {before:.4f} before, {after:.4f} after")
    return found


if __name__ == "__main__":
    main()
