"""Stages of a plan in this process: each built as on a rank, run by the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from raymm.actors.executor.executor import Executor
from raymm.actors.executor.step_meta import StepMeta
from raymm.actors.stages.labels import label_mask
from raymm.layout.stage_builders import stage_builders
from raymm.model.model import LANGUAGE_MODEL
from raymm.model.multimodal import MultimodalModule, complete_microbatch, text_inputs
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.lower import lower

SEED, STEP = 5, 3

Step = Sequence[Mapping[str, Any]]
Gradients = dict[str, torch.Tensor | None]


class StagesInProcess:
    """All stages of a plan on one rank, so that nothing is sent."""

    def __init__(self, model: MultimodalModule, plan: Plan) -> None:
        self.names = model.encoder_names
        stages = tuple(replace(stage, rank=0) for stage in plan.stages)
        self.plan = replace(plan, stages=stages, shared_ranks=(0,))
        builders = stage_builders(model, self.plan)
        self.stages: dict[str, nn.Module] = {n: build() for n, build in builders.build.items()}

    def run(self, step: Step, training: bool = True) -> float:
        """Run forward and backward of a step; accumulate gradients and return the loss."""
        batches = [complete_microbatch(one, self.names) for one in step]
        present = [tuple(name for name in self.names if name in one) for one in batches]
        (instructions,) = lower(self.plan, present, forward_only=not training).ranks
        inputs: dict[str, list[Any]] = {}
        for number, batch in enumerate(batches):
            data = {name: batch[name] for name in present[number]}
            for module, value in (*data.items(), (LANGUAGE_MODEL, text_inputs(batch))):
                firsts = (chain[0] for chain in self.plan.replicas(module))
                (reader,) = (one.id for one in firsts if self.plan.runs(one, number))
                inputs.setdefault(reader, [None] * len(batches))[number] = value
        executor = Executor(self.stages, self.plan.stage_edges, {}, {}, {})
        meta = StepMeta(
            STEP, label_tokens(step), tuple(range(len(step))), SEED, training=training
        )
        return sum(executor.run(executor.compile(instructions), inputs, meta).losses.values())

    def gradients(self) -> Gradients:
        """Return gradients by the reference's names, summed over replicas and tied stages."""
        found: Gradients = {}
        for name, stage in self.stages.items():
            module = name.module
            place = "language_model" if module == LANGUAGE_MODEL else f"{module}_encoder"
            for key, parameter in stage.named_parameters():
                if parameter.requires_grad:
                    full, known = f"{place}.{key}", found.get(f"{place}.{key}")
                    mine = None if parameter.grad is None else parameter.grad.clone()
                    found[full] = mine if known is None else known if mine is None else known + mine
        return found


def label_tokens(step: Step) -> int:
    return sum(int(label_mask(one["labels"]).sum()) for one in step)


def reference(model: MultimodalModule, step: Step) -> tuple[float, Gradients]:
    """Run one process, microbatch by microbatch, with the ranks' random numbers."""
    model.materialize().zero_grad()
    total = 0.0
    for number, batch in enumerate(step):
        with model.drawing(SEED, STEP, number):
            loss = model(**batch, label_tokens=label_tokens(step))
        loss.backward()
        total += float(loss.detach())
    found = {
        name: None if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    model.zero_grad()
    return total, found
