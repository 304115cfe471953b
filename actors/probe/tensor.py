"""The probe of tensor parallelism: does a sharded copy compute what the whole one does?

As in :mod:`raymm.actors.probe.cut`, a shrunk copy runs on the CPU, here whole and then in
``tp`` threads that hold a share each. Outputs and all gradients must be the whole's. So a plan
made from names needs no knowledge of the model: what it gets wrong is found here.
"""

from __future__ import annotations

import copy
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
from raymm.actors.sharding.tensor_plan import Choices, TensorPlan, plan_module, tensor_plan
from raymm.actors.sharding.tensor_rules import generic
from raymm.actors.sharding.tensor_shard import cut_tensor, shard_module
from raymm.actors.weights.source import ModuleSource
from raymm.errors import USER_CODE_RAISES, ProbeError
from raymm.kernels.collectives.tensor_group import TensorGroup, ThreadGroup, thread_groups

TOLERANCE = 1e-5
"""Of differences, relative to the norm of what is compared."""
# What may be rounding only (the gradient of a key's bias), relative to the largest gradient.
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
    """Of a forward and a backward: the output, and gradients of parameters and inputs."""

    output: torch.Tensor
    gradients: Tensors
    inputs: Tensors


class Comparison(NamedTuple):
    """Attributes:
        failure: what differs, in words; None if nothing does.
        partial: whole parameters of which every shard has a part of the gradient, although the
            plan does not know.
    """

    failure: str | None
    partial: frozenset[str] = frozenset()


class Trial(NamedTuple):
    """How a module is tried that is called otherwise than :func:`example_run` does.

    Attributes:
        source: of which small copies are made.
        of: of a small copy, the module's own model, how it is called, and with what.
    """

    source: ModuleSource
    of: Callable[[nn.Module], tuple[nn.Module, Run, Tensors]]


def probe_tensor(
    source: ModuleSource, tp: int, name: str, inputs: Tensors | None = None,
    read: Read = first_tensor, trial: Trial | None = None,
) -> TensorPlan:  # fmt: skip
    """The fastest plan under which a shrunk replica of the module gives the whole's numbers.

    Args:
        source: of the module.
        tp: processes that share it.
        name: of the module, for errors.
        inputs: example keyword arguments of an encoder; guessed from the config if not given.
        read: what others read of what an encoder's forward returns.
        trial: in place of inputs and read.

    Raises:
        PlanError: as :func:`~raymm.actors.sharding.tensor_plan.tensor_plan`.
        ProbeError: if no plan gives the same numbers, with what differs.
    """
    plan = tensor_plan(source, tp, name)  # before anything runs: sizes that do not fit
    if not plan.styles:
        return plan
    if trial is None:
        trial = Trial(source, lambda model: (model, *example_run(model, inputs, read)))
    own = trial
    return of_one_that_runs(own.source, lambda model: _probe(source, tp, name, *own.of(model)))


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
    """How stages call a model, and example inputs.

    Args:
        model: shrunk.
        inputs: of an encoder; None to guess them.
        read: as of :func:`probe_tensor`.
    """
    generator = torch.Generator().manual_seed(0)
    get = getattr(model, "get_output_embeddings", None)
    if inputs is None and get is not None and get() is not None:
        # Tokens from all over the vocabulary, in two samples.
        size = input_embeddings(model).weight.shape[0]
        ids = torch.linspace(0, size - 1, 2 * _TOKENS).long().view(_TOKENS, 2).T

        def run_language(stage: nn.Module, example: Tensors) -> torch.Tensor:
            embeds = input_embeddings(stage)(ids)
            return stage(inputs_embeds=embeds + example["embeds"], use_cache=False).logits

        with torch.no_grad():
            embeds = input_embeddings(model)(ids)
        # Added to the embeddings: images and sounds are, and need the gradient.
        return run_language, {"embeds": torch.randn(embeds.shape, generator=generator) * 0.1}
    if inputs is None and isinstance(model, Projector):
        features = torch.randn(2, _TOKENS, model.config.in_features, generator=generator)
        inputs = {"features": features}
    inputs = encoder_inputs(model, inputs)
    return lambda stage, example: read(stage(**example)), inputs


def run_whole(model: nn.Module, run: Run, inputs: Tensors) -> Result:
    """The whole model's outputs and gradients, which :func:`compare_shards` compares with.

    Args:
        model: left as it is: a copy runs.
        run: calls it.
        inputs: keyword arguments, tensors.
    """
    return _run(copy.deepcopy(model), run, inputs, None, None)


def compare_shards(
    model: nn.Module, plan: TensorPlan, run: Run, inputs: Tensors, expected: Result
) -> Comparison:
    """Run a copy of the model in shards, one thread each.

    Args:
        model: on the CPU; left as it is.
        plan: which shard of what each thread gets.
        run, inputs: as of :func:`example_run`.
        expected: the whole's.
    """
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

    copies = [copy.deepcopy(model) for _ in range(plan.tp)]
    groups = thread_groups(plan.tp)
    threads = [threading.Thread(target=work, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        own = (e for e in errors if not isinstance(e, threading.BrokenBarrierError))
        error = next(own, errors[0])
        return Comparison(f"its shards do not run{because(error)}")
    done = [result for result in results if result is not None]  # all, as there was no error
    return _compare(plan, done, expected)


def _compare(plan: TensorPlan, results: Sequence[Result], expected: Result) -> Comparison:
    for rank, result in enumerate(results):
        if not _close(result.output, expected.output):
            return Comparison(f"the output of shard {rank} differs from the whole's")
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
            return Comparison(f"the gradient of {name!r} differs from the whole's on shard {rank}")
    return Comparison(None, frozenset(partial - plan.partial))


def _sum(results: Sequence[Result], name: str, sharers: Any) -> torch.Tensor | None:
    total: Any = 0
    for rank in sharers:
        part = results[rank].gradients.get(name)
        if part is None:
            return None
        total = total + part
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
    # Copies, as a model may write on its inputs.
    output = run(model, {name: leaf.clone() for name, leaf in leaves.items()})
    whole, weights = output.detach(), _weights(output.detach())
    if plan is not None and group is not None and plan.head is not None:
        vocabularies = (plan.vocabulary(rank) for rank in range(plan.tp))
        shares = [share for share in vocabularies if share is not None]  # all: there is a head
        start, stop = shares[group.rank]
        if output.shape[-1] != stop - start:
            raise ValueError("its logits are not what its output head returns")
        whole = group.all_gather(whole, [b - a for a, b in shares], -1)
        weights = _weights(whole)[..., start:stop]
    (output * weights).sum().backward()
    return Result(
        whole,
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
    )


def _weights(output: torch.Tensor) -> torch.Tensor:
    """Of every output in the loss: no pattern that a normalisation would take away."""
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
