"""The probe of tensor parallelism: does a sharded copy compute what the whole one does?

As in :mod:`raymm.actors.stages.probe`, a shrunk copy runs on the CPU, here whole and then in
``tp`` threads that hold a share each. Outputs and all gradients must be the whole's. So a plan
made from names needs no knowledge of the model: what it gets wrong is found here.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from raymm.actors.stages.probe import ProbeError, example_inputs, first_tensor, small_model
from raymm.actors.stages.projector import Projector
from raymm.actors.stages.source import ModuleSource
from raymm.actors.stages.tensor_plan import TensorPlan, plan_module, tensor_plan
from raymm.actors.stages.tensor_shard import cut_tensor, shard_module
from raymm.kernels.tensor_group import ThreadGroup, thread_groups

TOLERANCE = 1e-5
"""Of differences, relative to the norm of what is compared."""
_NOISE = 1e-7  # of gradients that are zero but for rounding, relative to the largest norm
_TOKENS = 8

Run = Callable[[nn.Module], torch.Tensor]
Gradients = dict[str, torch.Tensor]

# From fast to safe. Attention whose heads are not dealt out is right whatever it does.
_CHOICES: tuple[dict[str, bool], ...] = (
    {},
    {"gather_attention": True},
    {"shard_vocabulary": False},
    {"gather_attention": True, "shard_vocabulary": False},
)


def probe_tensor(
    source: ModuleSource, tp: int, name: str, inputs: dict[str, torch.Tensor] | None = None
) -> TensorPlan:
    """The fastest plan under which a shrunk copy of the module gives the whole's numbers.

    Args:
        name: of the module, for errors.
        inputs: example keyword arguments of an encoder; guessed from the config if not given.

    Raises:
        PlanError: as :func:`~raymm.actors.stages.tensor_plan.tensor_plan`.
        ProbeError: if no plan gives the same numbers, with what differs.
    """
    plan = tensor_plan(source, tp, name)  # before anything runs: sizes that do not fit
    if not plan.styles:
        return plan
    model = small_model(source)
    run = _runner(model, inputs)
    whole = copy.deepcopy(model)
    expected = _backward(whole, run)
    failures: list[str] = []
    tried: list[TensorPlan] = []
    for choice in _CHOICES:
        small = plan_module(model, tp, name, ragged=True, **choice)
        if small in tried:
            continue
        tried.append(small)
        failure = compare_shards(model, small, run, expected)
        if failure is None:
            return tensor_plan(source, tp, name, **choice) if choice else plan
        failures.append(failure)
    raise ProbeError(
        f"tp of {name!r} is {tp}, but {type(model).__name__} cannot be sharded: {failures[0]}; "
        "set it to 1"
    )


def compare_shards(
    model: nn.Module, plan: TensorPlan, run: Run, expected: tuple[torch.Tensor, Gradients]
) -> str | None:
    """Run a copy of the model in shards, one thread each.

    Args:
        model: on the CPU; left as it is.
        run: what is computed; an output that a plan deals out is put together here.
        expected: the whole's output, and its gradients by name.

    Returns:
        What differs, in words; None if nothing does.
    """
    outputs: list[Any] = [None] * plan.tp
    errors: list[BaseException] = []

    def work(group: ThreadGroup) -> None:
        try:
            torch.manual_seed(0)
            shard = copies[group.rank]
            shard_module(shard, plan, group)
            outputs[group.rank] = _backward(shard, run, plan, group)
        except Exception as error:  # noqa: BLE001  whatever a model may raise
            errors.append(error)
            group.abort()

    copies = [copy.deepcopy(model) for _ in range(plan.tp)]
    threads = [
        threading.Thread(target=work, args=(group,), daemon=True)
        for group in thread_groups(plan.tp)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        first = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), None)
        error = first or errors[0]
        return f"its shards fail with {type(error).__name__}: {error}"
    return _difference(plan, outputs, expected)


def _difference(
    plan: TensorPlan, outputs: list[Any], expected: tuple[torch.Tensor, Gradients]
) -> str | None:
    output, gradients = expected
    for rank, (own, _) in enumerate(outputs):
        if own.shape != output.shape or not _close(own, output, output.norm()):
            return f"the output of shard {rank} differs from the whole's"
    floor = max((g.norm() for g in gradients.values()), default=torch.tensor(0.0)) * _NOISE
    for rank in range(plan.tp):
        for name, gradient in gradients.items():
            piece = cut_tensor(gradient, plan.piece(name, rank))
            parts = [outputs[other][1].get(name) for other in plan.holders(name, rank)]
            found = sum((p for p in parts if p is not None), torch.zeros(()))
            norm = max(gradient.norm(), floor / TOLERANCE)
            if found.shape not in (piece.shape, ()) or not _close(found, piece, norm):
                return f"the gradient of {name!r} differs from the whole's on shard {rank}"
    return None


def _close(found: torch.Tensor, expected: torch.Tensor, norm: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= TOLERANCE * norm)


def _backward(
    model: nn.Module, run: Run, plan: TensorPlan | None = None, group: ThreadGroup | None = None
) -> tuple[torch.Tensor, Gradients]:
    output = run(model)
    weights = torch.linspace(-1, 1, output.shape[-1]) if output.dim() else torch.ones(())
    # Not alike for all tokens, and nothing that a normalisation would take away.
    rows = torch.arange(1, output[..., 0].numel() + 1).view(output.shape[:-1])
    if plan is None or plan.head is None:
        (output * (weights + torch.cos(rows)[..., None])).sum().backward()
        found = output.detach()
    else:
        start, stop = plan.vocabulary(group.rank)
        sizes = [b - a for a, b in map(plan.vocabulary, range(plan.tp))]
        if output.shape[-1] != stop - start:
            raise ValueError("the logits are not what its output head returns")
        weights = torch.linspace(-1, 1, sum(sizes))[start:stop]
        (output * (weights + torch.cos(rows)[..., None])).sum().backward()
        found = group.all_gather(output.detach(), sizes, -1)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found, grads


def _runner(model: nn.Module, inputs: dict[str, torch.Tensor] | None) -> Run:
    get = getattr(model, "get_output_embeddings", None)
    if get is not None and get() is not None:
        vocabulary = model.get_input_embeddings().weight.shape[0]
        ids = torch.arange(3, 3 + 2 * _TOKENS).view(2, _TOKENS) * 5 % vocabulary

        def run_language(stage: nn.Module) -> torch.Tensor:
            # As a language stage calls it.
            embeds = stage.get_input_embeddings()(ids)
            return stage(inputs_embeds=embeds, use_cache=False).logits

        return run_language
    if inputs is None and isinstance(model, Projector):
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(2, _TOKENS, model.config.in_features, generator=generator)
        inputs = {"features": features}
    if inputs is None:
        config = getattr(model, "config", None)
        inputs = example_inputs(config, getattr(model, "main_input_name", "input"))
    return lambda stage: first_tensor(stage(**inputs))
