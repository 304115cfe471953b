"""Probe of tensor parallelism: do shards compute the same as the complete module?

As in :mod:`raymm.actors.probe.cut`, a small copy runs on the CPU: complete, and in ``tp`` threads
with a shard each. Outputs and all gradients must agree. Wrong guesses of a plan made from names are
found here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from raymm.actors.modules.blocks import input_embeddings
from raymm.actors.modules.brief_error import because
from raymm.actors.modules.message import Read, first_tensor
from raymm.actors.modules.projector import Projector
from raymm.actors.probe.cut import encoder_inputs, of_one_that_runs
from raymm.actors.probe.small_model import trial_copy
from raymm.actors.sharding.tensor_plan import Choices, TensorPlan, plan_module, tensor_plan
from raymm.actors.sharding.tensor_rules import generic
from raymm.actors.sharding.tensor_shard import cut_tensor, shard_module
from raymm.actors.weights.source import ModuleSource
from raymm.errors import USER_CODE_RAISES, ProbeError
from raymm.kernels.collectives.tensor_group import TensorGroup, ThreadGroup, thread_groups

TOLERANCE = 1e-5
"""Tolerance of differences, relative to the norm of the compared tensor."""
# Gradients below this, relative to the largest, may be only rounding errors (a key's bias).
_ROUNDING = 1e-2
_TOKENS = 8

# From fast to safe.
_CHOICES = tuple(
    Choices(gather, vocabulary, fused)
    for vocabulary in (True, False)
    for gather, fused in (
        ("", "blocks"), ("", "heads"), ("", "feed_forward"), ("", ""),
        ("attention", "feed_forward"), ("attention", ""), ("all", ""),
    )
)

Tensors = dict[str, torch.Tensor]
Run = Callable[[nn.Module, Tensors], torch.Tensor]


class Result(NamedTuple):
    """Result of a forward and backward: the output, and gradients of parameters and inputs."""

    output: torch.Tensor
    gradients: Tensors
    inputs: Tensors


class Comparison(NamedTuple):
    """Description of the first difference, or None.

    ``partial`` has replicated parameters with partial gradients that are missing in the plan.
    """

    failure: str | None
    partial: frozenset[str] = frozenset()


class Trial(NamedTuple):
    """Custom way to run a module in a trial, instead of :func:`example_run`.

    ``of`` maps a small copy of ``source`` to the module itself, the function that runs it, and
    inputs.
    """

    source: ModuleSource
    of: Callable[[nn.Module], tuple[nn.Module, Run, Tensors]]


def probe_tensor(
    source: ModuleSource, tp: int, name: str, inputs: Tensors | None = None,
    read: Read = first_tensor, trial: Trial | None = None,
) -> TensorPlan:  # fmt: skip
    """Return the fastest plan that gives the results of the complete module on a small copy.

    Args:
        tp: number of processes.
        name: name of the module, for errors.
        inputs: example keyword arguments of an encoder; guessed from the config if None.
        read: selects the part of an encoder's output that other modules read.
        trial: replaces ``inputs`` and ``read``.

    Raises:
        PlanError: see :func:`~raymm.actors.sharding.tensor_plan.tensor_plan`.
        ProbeError: no plan gives the same results; the message has the difference.
    """
    plan = tensor_plan(source, tp, name)  # reports sizes that do not fit before anything runs
    if not plan.styles:
        return plan
    if trial is None:
        trial = Trial(source, lambda model: (model, *example_run(model, inputs, read)))
    tried = trial
    return of_one_that_runs(tried.source, lambda model: _probe(source, tp, name, *tried.of(model)))


def _probe(
    source: ModuleSource, tp: int, name: str, model: nn.Module, run: Run, inputs: Tensors
) -> TensorPlan:
    expected = run_whole(model, run, inputs)
    first_failure, tried = None, []
    for choices in _CHOICES:
        if (small := plan_module(model, tp, name, choices, ragged=True)) in tried:
            continue
        tried.append(small)
        failure, partial = compare_shards(model, small, run, inputs, expected)
        if failure is None and partial:
            choices = replace(choices, partial=frozenset(map(generic, partial)))
            small = plan_module(model, tp, name, choices, ragged=True)
            failure, partial = compare_shards(model, small, run, inputs, expected)
        if failure is None and not partial:
            return tensor_plan(source, tp, name, choices)
        first_failure = first_failure or failure
    raise ProbeError(
        f"tp of {name!r} is {tp}, but {type(model).__name__} cannot be sharded: {first_failure}; "
        "set it to 1"
    )


def example_run(
    model: nn.Module, inputs: Tensors | None, read: Read = first_tensor
) -> tuple[Run, Tensors]:
    """Return a function that calls a small model as stages do, and example inputs; see
    :func:`probe_tensor`."""
    generator = torch.Generator().manual_seed(0)
    get = getattr(model, "get_output_embeddings", None)
    if inputs is None and get is not None and get() is not None:
        # Tokens from the entire vocabulary, in two samples.
        size = input_embeddings(model).weight.shape[0]
        ids = torch.linspace(0, size - 1, 2 * _TOKENS).long().view(_TOKENS, 2).T

        def run_language(stage: nn.Module, example: Tensors) -> torch.Tensor:
            embeds = input_embeddings(stage)(ids)
            return stage(inputs_embeds=embeds + example["embeds"], use_cache=False).logits

        with torch.no_grad():
            embeds = input_embeddings(model)(ids)
        # Added to the embeddings, like images and audio, which need a gradient.
        return run_language, {"embeds": torch.randn(embeds.shape, generator=generator) * 0.1}
    if inputs is None and isinstance(model, Projector):
        features = torch.randn(2, _TOKENS, model.config.in_features, generator=generator)
        inputs = {"features": features}
    inputs = encoder_inputs(model, inputs)
    return lambda stage, example: read(stage(**example)), inputs


def run_whole(model: nn.Module, run: Run, inputs: Tensors) -> Result:
    """Run a copy of the complete model, to compare with :func:`compare_shards`."""
    return _run(trial_copy(model), run, inputs, None, None)


def compare_shards(
    model: nn.Module, plan: TensorPlan, run: Run, inputs: Tensors, expected: Result
) -> Comparison:
    """Run copies of a CPU model in shards, one thread each, and compare with ``expected``."""
    results: list[Result | None] = [None] * plan.tp
    errors: list[BaseException] = []

    def work(group: ThreadGroup) -> None:
        try:
            shard = copies[group.rank]
            shard_module(shard, plan, group)
            results[group.rank] = _run(shard, run, inputs, plan, group)
        except USER_CODE_RAISES as error:  # whatever a model may raise
            errors.append(error)
            group.abort()

    copies = [trial_copy(model) for _ in range(plan.tp)]
    groups = thread_groups(plan.tp)
    threads = [threading.Thread(target=work, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        root_causes = (e for e in errors if not isinstance(e, threading.BrokenBarrierError))
        error = next(root_causes, errors[0])
        return Comparison(f"its shards do not run{because(error)}")
    done = [result for result in results if result is not None]  # all, because there was no error
    return _compare(plan, done, expected)


def _compare(plan: TensorPlan, results: Sequence[Result], expected: Result) -> Comparison:
    for rank, result in enumerate(results):
        if not _close(result.output, expected.output):
            return Comparison(f"the output of shard {rank} differs from the complete one")
        for name, gradient in expected.inputs.items():
            if not _close(result.inputs.get(name), gradient):
                return Comparison(f"the gradient of the input {name!r} differs on shard {rank}")
    partial = set()
    norms = [gradient.norm() for gradient in expected.gradients.values()]
    floor = float(max(norms, default=torch.zeros(()))) * _ROUNDING
    for name, gradient in expected.gradients.items():
        for rank in range(plan.tp):
            shard = cut_tensor(gradient, plan.shard(name, rank))
            norm = max(float(gradient.norm()), floor)
            if _close(_sum(results, name, plan.sharers(name, rank)), shard, norm):
                continue
            everyone = _sum(results, name, range(plan.tp))
            if plan.shard(name, rank) is None and _close(everyone, gradient, norm):
                partial.add(name)
                continue
            return Comparison(
                f"the gradient of {name!r} on shard {rank} differs from the complete one"
            )
    return Comparison(None, frozenset(partial - plan.partial))


def _sum(results: Sequence[Result], name: str, sharers: Any) -> torch.Tensor | None:
    total: Any = 0
    for rank in sharers:
        gradient = results[rank].gradients.get(name)
        if gradient is None:
            return None
        total = total + gradient
    return total


def _close(
    actual: torch.Tensor | None, expected: torch.Tensor, norm: float | None = None
) -> bool:
    if actual is None or actual.shape != expected.shape:
        return False
    limit = TOLERANCE * (float(expected.norm()) if norm is None else norm)
    return bool((actual - expected).norm() <= limit)


def _run(
    model: nn.Module, run: Run, inputs: Tensors, plan: TensorPlan | None, group: TensorGroup | None
) -> Result:
    leaves = {
        name: value.clone().requires_grad_(value.is_floating_point())
        for name, value in inputs.items()
    }
    # Copies, as a model may change its inputs.
    output = run(model, {name: leaf.clone() for name, leaf in leaves.items()})
    full_output, weights = output.detach(), _weights(output.detach())
    if plan is not None and group is not None and plan.head is not None:
        vocabularies = (plan.vocabulary(rank) for rank in range(plan.tp))
        # all, because there is a head
        shares = [share for share in vocabularies if share is not None]
        start, stop = shares[group.rank]
        if output.shape[-1] != stop - start:
            raise ValueError("its logits are not what its output head returns")
        full_output = group.all_gather(full_output, [b - a for a, b in shares], -1)
        weights = _weights(full_output)[..., start:stop]
    (output * weights).sum().backward()
    return Result(
        full_output,
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
    )


def _weights(output: torch.Tensor) -> torch.Tensor:
    """Return random weights of the outputs in the loss, which normalisations do not cancel."""
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
