"""Soak test ``python -m tests.soak.image_mixtures --steps N --seed S --layout NAME``.

A vision-language model on actors, whose samples have 0 to 5 images of random sizes each, is
compared with the model's own forward in one process: losses of all steps, and the work of each
process.

Training on random data amplifies rounding: a control process that sums the same microbatches in
reverse order differs from the first by more than 1e-5 after some 240 steps. So every ``--sync``
steps both copy the actors' parameters (0: never), and the distances of the first from them, and of
the control from the first, are reported.

Prints a line of JSON at the end. Exits with 1 if a loss differs, or a tower has worked on a
microbatch without images or has not worked on one with some.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import runnable
from benchmarks.vlm_matrix import KIND
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.model.vlm import PretrainedVlm, from_pretrained
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import ParallelSpec, vlm_plan
from raymm.scheduler.program.program import Op
from tests.support.trainer_groups import trainer_groups

MODEL = "Qwen2_5_VLForConditionalGeneration"
MICROBATCHES = 4
MOST_IMAGES = 5
SIZES = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1))  # size of an image in tokens
TOLERANCE = 1e-5
SYNC = 20
TIMEOUT_SECONDS = 120
MAX_NORM = 1.0
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1, max_grad_norm=MAX_NORM)
_SHARDED = ParallelSpec(dp=2, sharding="fsdp")
LAYOUTS: dict[str, dict[str, ParallelSpec]] = {
    "pp 2": dict.fromkeys(("vision", "llm"), ParallelSpec(pp=2)),
    "tp 2": dict.fromkeys(("vision", "llm"), ParallelSpec(tp=2)),
    "fsdp 2": {"vision": _SHARDED, "llm": _SHARDED},
    "cp 2": {"vision": _SHARDED, "llm": ParallelSpec(cp=2)},
}
MOST_ROWS = 3


def mixture(
    config: Any, example: dict[str, torch.Tensor], draw: random.Random
) -> dict[str, torch.Tensor]:
    """Return a microbatch of one row: text with images between it.

    Args:
        config: configuration of the model.
        example: microbatch that the model accepts.
        draw: random numbers for the number, sizes and positions of images.
    """
    merge = config.vision_config.spatial_merge_size
    vocabulary = 32
    special = {value for name, value in vars(config).items() if name.endswith("_token_id")}
    words = [token for token in range(3, vocabulary) if token not in special]
    ids, kinds, grids = draw.choices(words, k=draw.randint(2, 6)), [], []
    kinds = [0] * len(ids)
    for _ in range(draw.randint(0, MOST_IMAGES)):
        high, wide = draw.choice(SIZES)
        grids.append([1, high * merge, wide * merge])
        tokens, text = high * wide, draw.choices(words, k=draw.randint(1, 4))
        ids += [config.vision_start_token_id, *[config.image_token_id] * tokens, *text]
        kinds += [0, *[1] * tokens, *[0] * len(text)]
    batch = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
    if "mm_token_type_ids" in example:
        batch["mm_token_type_ids"] = torch.tensor([kinds])
    batch["labels"] = torch.tensor([[-100 if k else i for i, k in zip(ids, kinds, strict=True)]])
    if grids:
        batch["image_grid_thw"] = torch.tensor(grids)
        rows, generator = int(batch["image_grid_thw"].prod(1).sum()), torch.Generator()
        width = example["pixel_values"].shape[1]
        generator.manual_seed(draw.randrange(2**32))
        batch["pixel_values"] = torch.randn(rows, width, generator=generator)
    return batch


def together(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a microbatch of several rows, padded on the right.

    Args:
        samples: microbatches of one row each.
    """
    longest = max(sample["input_ids"].shape[1] for sample in samples)
    batch: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        values = [sample[name] for sample in samples if name in sample]
        if name not in ("pixel_values", "image_grid_thw"):
            fill = -100 if name == "labels" else 0
            values = [F.pad(v, (0, longest - v.shape[1]), value=fill) for v in values]
        batch[name] = torch.cat(values)
    return batch


class OneProcess:
    """Model's own forward in one process, with an optimizer."""

    def __init__(self, model: PretrainedVlm) -> None:
        self._model = model
        module = model.materialize()
        self._trained = dict(module.named_parameters())
        self._optimizer = torch.optim.AdamW(
            trainer_groups(module, OPTIMIZER.weight_decay), lr=OPTIMIZER.lr,
            betas=OPTIMIZER.betas, eps=OPTIMIZER.eps,
        )

    def step(self, batches: list[dict[str, torch.Tensor]]) -> float:
        """Run one step; return its loss."""
        self._optimizer.zero_grad()
        loss = self._model.loss(batches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained.values(), MAX_NORM)
        self._optimizer.step()
        return loss.item()

    def take(self, parameters: dict[str, torch.Tensor]) -> float:
        """Continue with these parameters.

        Returns:
            Largest change of a parameter, relative to its norm.
        """
        worst = 0.0
        with torch.no_grad():
            for name, value in parameters.items():
                own = self._trained[name]
                worst = max(worst, float((own - value).norm() / value.norm().clamp(min=1e-6)))
                own.copy_(value)
        return worst


def soak(
    steps: int, seed: int, sync: int = SYNC, layout: str = "pp 2", packing: bool = False
) -> dict[str, Any]:
    """Train on mixtures.

    Args:
        seed: seed of the weights and the data.
        sync: steps after which both processes copy the actors' parameters; 0 for never.
        layout: one of :data:`LAYOUTS`.
        packing: True to pack rows.

    Returns:
        Printed results.
    """
    cls = getattr(transformers, MODEL)
    config, (example, *_) = runnable(Family(KIND, cls, cls.config_class))
    config.architectures = [MODEL]
    model = from_pretrained(config, example, seed=seed, packing=packing)
    draw, report = random.Random(seed), dict.fromkeys(("in_vain", "left_out"), 0)
    rows = 1 if layout == "pp 2" and not packing else MOST_ROWS
    images: dict[int, int] = {}
    worst, worst_control, apart, started = 0.0, 0.0, 0.0, time.monotonic()
    alone, control = OneProcess(model), OneProcess(from_pretrained(config, example, seed=seed))
    plan = vlm_plan(model, LAYOUTS[layout], MICROBATCHES)
    with ParallelModel(
        model, plan, optimizer=OPTIMIZER, timeout_s=TIMEOUT_SECONDS
    ) as running:
        for step in range(steps):
            batches = [
                together([mixture(config, example, draw) for _ in range(draw.randint(1, rows))])
                for _ in range(MICROBATCHES)
            ]
            output = running.train_step(batches)
            due, other = alone.step(batches), control.step(batches[::-1])
            worst = max(worst, abs(output.loss - due) / abs(due))
            worst_control = max(worst_control, abs(other - due) / abs(due))
            if sync and (step + 1) % sync == 0:
                parameters = running.parameters()
                apart = max(apart, alone.take(parameters))
                control.take(parameters)
            have = {i for i, batch in enumerate(batches) if "pixel_values" in batch}
            worked = {
                span.microbatch for span in output.timeline.spans
                if span.op == Op.FORWARD and span.stage.module == "vision"
            }  # fmt: skip
            report["in_vain"] += len(worked - have)
            report["left_out"] += len(have - worked)
            for batch in batches:
                count = len(batch.get("image_grid_thw", ()))
                images[count] = images.get(count, 0) + 1
    return {
        "steps": steps, "layout": layout, "packing": packing,
        "microbatches_by_images": dict(sorted(images.items())),
        "sync": sync, "worst_loss_difference": worst, "worst_of_control": worst_control,
        "worst_parameter_difference": apart, **report,
        "seconds": round(time.monotonic() - started, 1),
        "ok": worst <= TOLERANCE and not any(report.values()),
    }  # fmt: skip


def main() -> int:
    """Run the soak; return 0 if nothing differs."""
    import ray

    from raymm.runtime.embedded.embedded_ray import start_embedded_ray

    parser = argparse.ArgumentParser("python -m tests.soak.image_mixtures", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sync", type=int, default=SYNC)
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="pp 2")
    parser.add_argument("--packing", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"
    with tempfile.TemporaryDirectory(prefix="raymm-mix-", dir="/tmp") as folder:
        start_embedded_ray(
            num_cpus=8, log_to_driver=False, object_store_memory=200 * 2**20, _temp_dir=folder
        )
        try:
            report = soak(
                options.steps, options.seed, options.sync, options.layout, options.packing
            )
        finally:
            ray.shutdown()
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
