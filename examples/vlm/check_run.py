"""Check what a run of a whole model has left behind, and the folder that was exported of it.

    raymm export examples/vlm/real.yaml --out runs/vlm/exported
    python -m examples.vlm.check_run examples/vlm/real.yaml --exported runs/vlm/exported

Fails unless every step is there with a finite loss, a whole checkpoint and all pictures are, the
held-out loss has fallen, more held-out answers are right than the most common answer to each
question would be, and the exported folder, read by transformers alone, is of the same class and
keys as the one that was trained and gives the same logits bit for bit as the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor

from examples.alignment.check_run import problems
from examples.vlm.answers import draw_answers
from raymm.config.build import build_model
from raymm.config.sections import TrainConfig, load_config
from raymm.model.vlm import PretrainedVlm
from raymm.monitor.metrics import read_metrics
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import load_into_model

SAMPLES = 8  # held-out ones whose logits are compared


def run_problems(config: TrainConfig) -> Iterator[str]:
    """Return the problems of a run. Prints its scores, and draws its last answers."""
    folder = Path(config.run.storage_path)
    yield from problems(folder, config.run.steps, None)
    rows = read_metrics(folder / "metrics.jsonl")
    losses = [(row["step"], row["heldout_loss"]) for row in rows if "heldout_loss" in row]
    print("held-out loss " + ", ".join(f"{loss:.3f} after {step}" for step, loss in losses))
    if len(losses) < 2 or not losses[-1][1] < losses[0][1]:
        yield "the held-out loss has not fallen"
    tables = [row for row in rows if "table" in row]
    if not tables:
        yield "no texts were written"
        return
    for row in tables:
        texts = _texts(folder, row)
        right, common = _shares(texts)
        print(f"step {row['step']}: of {len(texts)} held-out answers right " + ", ".join(
            f"{name} {share:.1%} (the most common answer: {common[name]:.1%})"
            for name, share in right.items()
        ))
    print(draw_answers(texts, _heldout(config), folder / "answers.png"))
    if not right["all"] > common["all"]:
        yield "no more answers are right than the most common ones would be"


def _heldout(config: TrainConfig) -> Path:
    assert config.data.heldout is not None  # what it writes is of them
    return Path(config.data.heldout[0].path)


def _texts(folder: Path, row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the generated texts, as data for the table."""
    lines = (folder / row["table"]).with_suffix(".jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in lines.splitlines()]


def _shares(texts: Sequence[Mapping[str, str]]) -> tuple[dict[str, float], dict[str, float]]:
    """By question, which is how ids begin, and of all: the share of texts that are right, and that
    would be if the most common answer to each question were given always."""
    questions: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for text in texts:
        questions[text["id"].partition("/")[0]].append(text)
    right = {
        name: sum(text["text"] == text["answer"] for text in own)
        for name, own in sorted(questions.items())
    }
    common = {
        name: Counter(text["answer"] for text in questions[name]).most_common(1)[0][1]
        for name in right
    }
    counts = {name: len(own) for name, own in questions.items()}
    return _of_all(right, counts), _of_all(common, counts)


def _of_all(some: Mapping[str, int], counts: Mapping[str, int]) -> dict[str, float]:
    """Shares by question, and of all questions."""
    shares = {name: number / counts[name] for name, number in some.items()}
    return {**shares, "all": sum(some.values()) / sum(counts.values())}


def export_problems(config: TrainConfig, exported: Path) -> Iterator[str]:
    """Return the problems of an exported folder. Prints each comparison.

    Args:
        config: of the run.
        exported: the folder.
    """
    model = build_model(config)
    assert isinstance(model, PretrainedVlm) and config.model.path is not None
    checkpoint = CheckpointStore(config.run.storage_path).newest()
    assert checkpoint is not None  # else the run had problems
    load_into_model(model, checkpoint.folder)
    trained, first = model.materialize().eval(), Path(config.model.path)
    read = AutoModelForImageTextToText.from_pretrained(exported).eval()
    if type(read) is not type(trained):
        yield f"{exported} is a {type(read).__name__}, the model a {type(trained).__name__}"
        return
    if _shapes(exported) != _shapes(first):
        yield f"{exported} has not the keys and shapes of {first}"
    old, new = (AutoProcessor.from_pretrained(folder) for folder in (first, exported))
    if old.chat_template != new.chat_template or old.to_dict() != new.to_dict():
        yield f"the processor of {exported} is not that of {first}"
    differ, count = 0, 0
    for inputs in _inputs(new, _heldout(config)):
        with torch.no_grad():
            ours, theirs = trained(**inputs).logits, read(**inputs).logits
        differ += not torch.equal(ours, theirs)
        count += 1
    print(f"{exported}: {type(read).__name__}, {len(_shapes(exported))} tensors; logits of "
          f"{count - differ} of {count} held-out samples are the checkpoint's bit for bit")
    if differ:
        yield f"logits of {differ} held-out samples are not the checkpoint's"


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a folder."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            shapes |= {n: tuple(tensors.get_slice(n).get_shape()) for n in tensors.keys()}
    return shapes


def _inputs(processor: Any, file: Path) -> Iterator[Any]:
    """Return the outputs of transformers' processor for the first samples."""
    for _, line in zip(range(SAMPLES), file.open(encoding="utf-8"), strict=False):
        row = json.loads(line)
        text = processor.apply_chat_template(row["messages"], tokenize=False)
        images = [Image.open(file.parent / name) for name in row["images"]]
        yield processor(text=text, images=images or None, return_tensors="pt")


def main(arguments: list[str] | None = None) -> int:
    """Print what is wrong; returns 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="section.field=value")
    parser.add_argument("--exported", type=Path)
    options = parser.parse_args(arguments)
    config = load_config(options.config, options.set)
    folder = Path(config.run.storage_path)
    found = list(run_problems(config))
    if options.exported is not None and not found:
        found += export_problems(config, options.exported)
    for problem in found:
        print(f"{folder}: {problem}")
    if not found:
        print(f"{folder}: {config.run.steps} steps, all there")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
