"""Claim: raymm on 2 ranks trains faster than one process with all cores.

Run with `python -m benchmarks.train_throughput --json`.

The alignment example's model and real batches (prepare them first: ``make prepare``). Both
contenders do the same maths on the same batches: forward, backward, clipping and AdamW in the
example's precision, without cached features. They alternate in one run; key
``raymm_over_single_process`` is the ratio of tokens per second (above 1: raymm is faster).
``single_process_cast`` is the same process with raymm's bf16 copies of frozen weights.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.shared.common import console, emit, machine, parser
from raymm.actors.modules.precision import cast_frozen
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.optimizer.updates import layer_norm_parameters
from raymm.config.build import build_model, build_plan
from raymm.config.sections import TrainConfig, load_config
from raymm.data import local_steps
from raymm.data.samples.collate import split_parts
from raymm.runtime.cluster import connected
from raymm.runtime.parallel_model import ParallelModel

CONFIG = "examples/alignment/stamps.yaml"


class SingleProcess:
    """Reference: the full model in this process, with all cores.

    ``cast`` keeps frozen weights in autocast's dtype, as raymm does. Autocast casts them in every
    forward instead.
    """

    def __init__(self, config: TrainConfig, optimizer: OptimizerConfig, cast: bool) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        self.model = build_model(config).materialize()
        if cast and config.run.precision == "bf16":
            cast_frozen(self.model, torch.bfloat16)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(trained.values())
        self.config = optimizer
        # Biases and norms have no weight decay, as in raymm.
        norms = layer_norm_parameters([self.model])
        groups = [
            {"params": [p], "weight_decay": optimizer.decay(name, id(p) in norms)}
            for name, p in trained.items()
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, optimizer.factor)
        bf16 = config.run.precision == "bf16"
        self.precision = torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext()

    def run(self, steps: Sequence[Any]) -> list[float]:
        """Train on the steps; return their losses."""
        losses = []
        for step in steps:
            label_tokens = sum(meta.label_tokens for meta in step.meta)
            total = 0.0
            for microbatch in step.microbatches:
                with self.precision:
                    loss = self.model(**microbatch, label_tokens=label_tokens)
                if loss.requires_grad:
                    loss.backward()
                total += float(loss.detach())
            if self.config.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(total)
        return losses


class OnRay:
    """Same model on actors, with as many steps in flight as in the trainer."""

    def __init__(self, config: TrainConfig, optimizer: OptimizerConfig) -> None:
        model = build_model(config)
        self.parallel = ParallelModel(
            model, build_plan(config, model), optimizer=optimizer,
            precision=config.run.precision, device="cpu",
            resources=config.resources.for_device("cpu"), threads=config.resources.threads,
        )
        self.ahead = config.run.steps_in_flight

    def run(self, steps: Sequence[Any]) -> list[float]:
        """Train on the steps; return their losses."""
        losses, pending = [], []
        for step in steps:
            parts = [split_parts(microbatch) for microbatch in step.microbatches]
            pending.append(self.parallel.submit((parts, step.meta), update=True))
            if len(pending) >= self.ahead:
                losses.append(pending.pop(0).result().loss)
        self.outputs = [one.result() for one in pending]
        return losses + [output.loss for output in self.outputs]


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--config", default=CONFIG)
    options.add_argument("--set", action="append", default=[], dest="overrides")
    options.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    options.add_argument("--steps", type=int, default=4, help="steps per turn")
    args = options.parse_args()
    started = time.perf_counter()
    config = load_config(args.config, args.overrides)
    optimizer = config.optimizer.build(config.run.steps)
    steps = list(local_steps(config.data, steps=args.steps * (args.rounds + 1)))
    turns = [steps[i : i + args.steps] for i in range(0, len(steps), args.steps)]
    with connected():
        contenders = {
            "raymm": OnRay(config, optimizer),
            "single_process": SingleProcess(config, optimizer, cast=False),
            "single_process_cast": SingleProcess(config, optimizer, cast=True),
        }
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        difference = 0.0
        for number, turn in enumerate(turns):
            losses = {}
            order = list(contenders) if number % 2 else list(reversed(contenders))
            for name in order:
                start = time.perf_counter()
                losses[name] = contenders[name].run(turn)
                seconds = time.perf_counter() - start
                tokens = sum(meta.tokens for step in turn for meta in step.meta)
                if number:  # the first round warms up
                    rates[name].append(tokens / seconds)
            pairs = zip(losses["raymm"], losses["single_process"], strict=True)
            difference = max([difference, *(abs(a - b) / b for a, b in pairs)])
        timeline = contenders["raymm"].outputs[-1].timeline
        busy = [round(timeline.busy(r) / timeline.makespan, 3) for r in range(timeline.num_ranks)]
        contenders["raymm"].parallel.shutdown()
    median = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "benchmark": "train_throughput",
        "raymm_over_single_process": round(median["raymm"] / median["single_process"], 3),
        "raymm_over_single_process_cast": round(median["raymm"] / median["single_process_cast"], 3),
        "text_tokens_per_s": {name: round(value, 1) for name, value in median.items()},
        "all_tokens_per_s": {name: [round(v, 1) for v in values] for name, values in rates.items()},
        "rank_busy": busy,
        "max_relative_loss_difference": difference,
        "steps_per_turn": args.steps,
        "rounds": args.rounds,
        "seconds": round(time.perf_counter() - started, 1),
        "machine": machine(),
    }
    console().print(result)
    emit(result, args.json)


if __name__ == "__main__":
    main()
