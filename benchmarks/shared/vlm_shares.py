"""Check of sharded vision-language models against the same model in one process.

Compares the loss, every gradient, and the parameters after three AdamW steps. Every process has all
stages, so only communication within a rank takes place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from benchmarks.shared.family_check import EXACT, REFUSED, WRONG, Outcome
from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import noisy, runnable
from raymm.actors.executor.executor import Executor
from raymm.actors.executor.step_meta import StepMeta
from raymm.actors.sharding.fully_sharded import local_part
from raymm.actors.sharding.parameter_shards import ShardSpec
from raymm.errors import Error
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.collectives.tensor_group import TensorGroup
from raymm.layout.stage_builders import stage_builders
from raymm.model.model import LANGUAGE_MODEL
from raymm.model.vlm import PretrainedVlm, from_pretrained
from raymm.model.vlm_batch import vlm_parts
from raymm.runtime.specs import ParallelSpec, vlm_plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.schedule.lower import lower

KIND = "whole model"
STEPS, MICROBATCHES = 3, 4
# Relative to the gradient's own norm; gradients that are only rounding error (a key's bias) are
# compared with the largest norm.
TOLERANCE, FLOOR = 1e-5, 1e-6
LOSS_TOLERANCE = 1e-6
# Relative to the distance that a parameter moved, as AdamW amplifies a gradient's rounding. If the
# gradient is only rounding error: relative to the largest distance that AdamW can move.
MOVED_TOLERANCE, MOVED_FLOOR, ROUNDING_TOLERANCE = 1e-3, 1e-7, 1e-2
_ALIKE = 1e-5  # values of replicas, relative to their norm
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1}


@dataclass(frozen=True)
class Layout:
    """Layout of a model over the processes.

    Attributes:
        specs: specs by module; ``"tower"`` means all towers.
        options: options of :func:`raymm.from_pretrained`; in ``train``, ``"tower"`` means all
            towers.
        longrope: number of trained positions for rotary embeddings whose frequencies change in
            longer texts; None for the model's default.
    """

    specs: Mapping[str, ParallelSpec] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    longrope: int | None = None

    def of(self, model: PretrainedVlm) -> dict[str, ParallelSpec]:
        """Return the specs by the model's module names."""
        every = {name: self.specs.get("tower", ParallelSpec()) for name in model.tower_names}
        return every | {LANGUAGE_MODEL: self.specs.get(LANGUAGE_MODEL, ParallelSpec())}


def made(name: str, layout: Layout) -> tuple[PretrainedVlm, list[dict[str, torch.Tensor]]]:
    """Build a tiny model of a class, and microbatches.

    Args:
        layout: layout with options of the model.
    """
    model_class = getattr(transformers, name)
    config, microbatches = runnable(Family(KIND, model_class, model_class.config_class))
    config.architectures = [name]
    if layout.longrope is not None:
        text = config.get_text_config()
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        half = width // 2
        text.rope_parameters = {
            **text.rope_parameters, "rope_type": "longrope", "factor": 2.0,
            "original_max_position_embeddings": layout.longrope,
            "short_factor": [1.0] * half, "long_factor": [1.0 + one for one in range(half)],
        }
    options, train = dict(layout.options), dict(layout.options.get("train", {}))
    if (how := train.pop("tower", None)) is not None:
        towers = from_pretrained(config, microbatches[0]).tower_names
        options["train"] = {**train, **dict.fromkeys(towers, how)}
    model = from_pretrained(config, microbatches[0], seed=4, **options)
    return model, [*microbatches, microbatches[0]][:MICROBATCHES]


def outcome(group: dist.ProcessGroup, name: str, layout: Layout) -> Outcome:
    """Return the outcome of a class under a layout.

    Args:
        group: processes; all of them call this function.
        layout: layout for as many processes.
    """
    try:
        model, microbatches = made(name, layout)
        own = _Shares(group, model, layout)
    except Error as error:  # raised by all processes before any communication
        return Outcome(REFUSED, str(error))
    problems = compare(own, model, microbatches)
    return Outcome(WRONG, problems) if problems else Outcome(EXACT)


def compare(own: _Shares, model: PretrainedVlm, microbatches: list[dict[str, torch.Tensor]]) -> str:
    """Describe the differences from one process; empty if there are none.

    Args:
        own: this process's shards.
    """
    reference = noisy(model.materialize())
    trained = {n: p for n, p in reference.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), **OPTIMIZER)
    problems: list[str] = []
    rounding: frozenset[str] = frozenset()
    for step in range(STEPS):
        optimizer.zero_grad()
        total = model.loss(microbatches)
        total.backward()
        found, loss = own.run(microbatches, step), float(total.detach())
        if abs(found - loss) > LOSS_TOLERANCE * 10 ** bool(step) * abs(loss):
            problems.append(f"loss of step {step + 1} is {found:.7g}, not {loss:.7g}")
        if not step:
            due = {n: p.grad for n, p in trained.items()}
            problems += gradient_problems(own.gathered(gradients=True), due)
            rounding = only_rounding(due)
        optimizer.step()
        own.optimizer.step()
    problems += moved_problems(own.gathered(gradients=False), trained, before, rounding)
    return "; ".join(problems)


def gradient_problems(
    found: Mapping[str, torch.Tensor | None], due: Mapping[str, torch.Tensor | None],
    tolerance: float = TOLERANCE,
) -> list[str]:  # fmt: skip
    """Describe the gradients that differ, each relative to its own norm.

    Args:
        tolerance: accepted error, relative to the norm.
    """
    problems = [f"{name}: only on one side" for name in sorted(found.keys() ^ due.keys())]
    largest = max(float(g.norm()) for g in due.values() if g is not None)
    rounding = only_rounding(due)
    for name in found.keys() & due.keys():
        mine, other = found[name], due[name]
        if mine is None or other is None:
            if any(g is not None and bool(g.any()) for g in (mine, other)):
                problems.append(f"{name}: a gradient on one side only")
            continue
        error, norm = float((mine - other).norm()), float(other.norm())
        floor = FLOOR * largest if name in rounding else 0.0
        if not error <= max(tolerance * norm, floor):
            problems.append(f"gradient of {name}: error {error:.2e} of {norm:.2e}")
    return problems


def only_rounding(due: Mapping[str, torch.Tensor | None]) -> frozenset[str]:
    """Return names of parameters whose gradient is only rounding error.

    One example is a key's bias, since a softmax is invariant to it.
    """
    norms = {name: float(g.norm()) for name, g in due.items() if g is not None}
    return frozenset(n for n, norm in norms.items() if norm <= 1e-5 * max(norms.values()))


def moved_problems(
    found: Mapping[str, torch.Tensor | None], due: Mapping[str, torch.Tensor],
    before: Mapping[str, torch.Tensor], rounding: frozenset[str],
    tolerance: float = MOVED_TOLERANCE,
) -> list[str]:  # fmt: skip
    """Describe the parameters that differ after the steps.

    Args:
        before: values before the first step.
        rounding: names from :func:`only_rounding`.
        tolerance: accepted error, relative to the distance that a parameter moved.
    """
    problems = []
    for name, parameter in due.items():
        mine = found[name]
        assert mine is not None
        moved = float((parameter.detach() - before[name]).norm())
        error = float((mine - parameter.detach()).norm())
        accepted = tolerance * moved + MOVED_FLOOR
        if name in rounding:
            accepted = ROUNDING_TOLERANCE * OPTIMIZER["lr"] * STEPS * parameter.numel() ** 0.5
        if not error <= accepted:
            problems.append(f"{name} after {STEPS} steps: error {error:.2e} of {moved:.2e}")
    return problems


class _Shares:
    """Shards of a model on one process."""

    def __init__(self, group: dist.ProcessGroup, model: PretrainedVlm, layout: Layout) -> None:
        self._group, self._model = group, model
        specs = layout.of(model)
        plan = vlm_plan(model, specs, num_microbatches=MICROBATCHES)
        builders = stage_builders(model, plan)
        self._shard_specs, self._degrees = builders.shard_specs, {
            stage.module: stage.degrees for stage in plan.stages
        }
        self.stages: dict[StageId, Any] = {}
        for stage in plan.stages:
            self.stages[stage.id] = self._built(builders.build[stage.id](), stage.module)
        alone = replace(
            plan, shared_ranks=(0,),
            stages=tuple(
                replace(s, rank=0, tp=1, cp=1, fsdp=1, ep=1, sharding="none") for s in plan.stages
            ),
        )  # fmt: skip
        self._plan = alone
        shared = self._degrees[LANGUAGE_MODEL]
        self._executor = Executor(
            self.stages, alone.stage_edges, {}, {}, {},
            sum_gradient=self._summed if shared.fsdp * shared.cp > 1 else None,
        )
        self._places = {
            name: dist.get_rank(group) if max(degrees) > 1 else 0
            for name, degrees in self._degrees.items()
        }
        named = [p for s in self.stages.values() for p in s.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(named, foreach=False, **OPTIMIZER)

    def _built(self, stage: Any, module: str) -> nn.Module:
        noisy(stage)
        degrees, spec = self._degrees[module], self._shard_specs[module]
        if degrees.tp > 1:
            stage.shard_tensors(spec.plans, TensorGroup(self._group))
        if degrees.fsdp > 1:
            stage.share_samples(Exchange(self._group))
        if degrees.cp > 1:
            stage.share_tokens(Exchange(self._group))
        if spec.shards > 1:
            stage.shard_parameters(spec.plans, self._group, torch.device("cpu"))
        return stage

    def _summed(self, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=self._group)
        return gradient

    def run(self, microbatches: list[dict[str, torch.Tensor]], step: int) -> float:
        """Run a step and return its loss; gradients are then summed over processes and stages."""
        self.optimizer.zero_grad()
        towers = self._model.tower_inputs
        parts = [vlm_parts(towers, batch, LANGUAGE_MODEL) for batch in microbatches]
        present = [tuple(name for name in part if name != LANGUAGE_MODEL) for part in parts]
        (instructions,) = lower(self._plan, present).ranks
        inputs: dict[StageId, list[Any]] = {}
        for number, part in enumerate(parts):
            for name, own in part.items():
                firsts = [replica[0] for replica in self._plan.replicas(name)]
                (reader,) = [stage.id for stage in firsts if self._plan.runs(stage, number)]
                inputs.setdefault(reader, [None] * len(parts))[number] = own
        labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in microbatches)
        meta = StepMeta(step, labels, tuple(range(len(parts))))
        result = self._executor.run(self._executor.compile(instructions), inputs, meta)
        loss = torch.tensor(sum(result.losses.values()), dtype=torch.float64)
        if self._executor_shares:
            dist.all_reduce(loss, group=self._group)
        self._reduce()
        return float(loss.detach())

    @property
    def _executor_shares(self) -> bool:
        degrees = self._degrees[LANGUAGE_MODEL]
        return degrees.fsdp * degrees.cp > 1

    def _reduce(self) -> None:
        by_name: dict[tuple[str, str], list[nn.Parameter]] = {}
        for stage, module in self.stages.items():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    by_name.setdefault((stage.module, name), []).append(parameter)
        for (module, name), owned in by_name.items():
            present = [p for p in owned if p.grad is not None]
            total = None
            if present:
                total = torch.stack([local_part(p.grad) for p in present]).sum(0)
            if self._sums(module, name):
                anybody = torch.tensor(float(total is not None))
                dist.all_reduce(anybody, group=self._group)
                if not anybody:
                    continue
                total = torch.zeros_like(local_part(owned[0])) if total is None else total
                dist.all_reduce(total, group=self._group)
            for parameter in owned if total is not None else ():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local_part(parameter.grad).copy_(total)

    def _sums(self, module: str, name: str) -> bool:
        degrees, spec = self._degrees[module], self._shard_specs[module]
        if degrees.cp > 1 and degrees.fsdp == 1:
            return True
        return len(spec.sharers(name, self._places[module])) > 1

    def gathered(self, gradients: bool) -> dict[str, torch.Tensor | None]:
        """Return full gradients or parameters by the model's names."""
        own: dict[tuple[str, str], torch.Tensor | None] = {}
        for stage, module in self.stages.items():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    value = parameter.grad if gradients else parameter.detach()
                    own[stage.module, name] = None if value is None else local_part(value).clone()
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, own, group=self._group)
        found: dict[str, torch.Tensor | None] = {}
        for (module, name), _ in own.items():
            full, spec = name.removeprefix("module."), self._shard_specs[module]
            pieces = [each[module, name] for each in everyone]
            found[full] = _assembled(spec, name, pieces)
        return found


def _assembled(
    spec: ShardSpec, name: str, pieces: list[torch.Tensor | None]
) -> torch.Tensor | None:
    """Assemble a parameter from its shards, which are already summed.

    Raises:
        ValueError: the values of replicas differ.
    """
    if spec.shard(name, 0) is None:
        first = pieces[0]
        for place, piece in enumerate(pieces):
            alike = first is piece is None or (
                first is not None and piece is not None
                and bool((piece - first).norm() <= _ALIKE * first.norm())
            )
            if not alike:
                raise ValueError(f"{name} of process {place} differs from that of process 0")
        return first
    whole: torch.Tensor | None = None
    for place, piece in enumerate(pieces):
        if piece is not None and not spec.is_replica(name, place):
            whole = spec.add(whole, name, place, len(pieces), piece)
    return whole
