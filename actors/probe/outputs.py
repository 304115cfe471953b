"""Probe of an encoder's outputs: does raymm, which uses one tensor, drop outputs that training
needs?

An output counts as dropped if it depends on parameters that the used tensor does not depend on:
they would never learn. Summaries, with at most one vector per item where the used tensor has more
(a pooler's output), do not count. Hidden states, attentions and poolers of plain encoders are thus
accepted; features of a merger, levels of a pyramid or a codebook's loss are reported.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from raymm.actors.modules.brief_error import because
from raymm.actors.modules.message import first_tensor
from raymm.actors.probe.callbacks import chain_example, module_inputs, own_callbacks
from raymm.actors.probe.cut import of_one_that_runs
from raymm.actors.probe.history import check_history, other_values
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.stages.encoder import EncoderSpec
from raymm.actors.stages.stage_inputs import fields
from raymm.errors import USER_CODE_RAISES, NotRunError, ProbeError

_SHOWN = 3


@plain_torch()
def check_outputs(
    spec: EncoderSpec, example: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Check that training needs only the used tensor of an encoder's output; return the inputs
    tried.

    Outputs of a postprocess callback that returns a tensor are not checked.

    Args:
        example: batch entries of the encoder; guessed if None.

    Raises:
        ProbeError: no tensor could be used, or more than one is needed.
        NotRunError: the encoder does not run.
    """
    return of_one_that_runs(spec.source, lambda model: _check(spec, model, example))


def _check(
    spec: EncoderSpec, model: nn.Module, example: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    try:
        example = chain_example(spec, model, example)
        inputs = module_inputs(spec, example)
        with torch.random.fork_rng(devices=[]):
            output = model(**copy.deepcopy(inputs))
            if spec.postprocess_module is not None:
                postprocess = own_callbacks(spec).postprocess_module
                assert postprocess is not None
                output = postprocess(inputs, output)
    except USER_CODE_RAISES as error:  # whatever a module or callback may raise
        raise NotRunError(
            f"{spec.name!r} does not run on its example_inputs{because(error)}; give inputs that "
            "its forward accepts"
        ) from error
    _check_history(spec, model, inputs)
    if isinstance(output, torch.Tensor):
        return example
    name = type(model).__name__
    try:
        picked = first_tensor(output)
    except (TypeError, IndexError) as error:
        names = ", ".join(fields(output)) or "nothing"
        raise ProbeError(
            f"{name}, the encoder of {spec.name!r}, returns a {type(output).__name__} ({names}) "
            "without last_hidden_state; give a postprocess_module_callback that returns the tensor "
            "to use"
        ) from error
    if dropped := list(_dropped(model, output, picked)):
        raise ProbeError(
            f"{name}, the encoder of {spec.name!r}, returns {', '.join(dropped)} in addition to "
            f"the tensor of shape {tuple(picked.shape)} that would be used; their parameters would "
            "have no effect. Give a postprocess_module_callback that returns the tensor to use, "
            "such as lambda inputs, output: output.last_hidden_state"
        )
    return example


def check_node_history(spec: EncoderSpec, example: Mapping[str, Any] | None = None) -> None:
    """Check that a graph module's results do not depend on earlier forwards.

    Modules whose inputs cannot be guessed, without ``example``, are not checked.

    Raises:
        ProbeError: a forward depends on earlier forwards.
    """
    def probe(model: nn.Module) -> None:
        try:
            inputs = module_inputs(spec, chain_example(spec, model, example))
        except (ProbeError, *USER_CODE_RAISES) as error:  # whatever a callback may raise
            raise NotRunError(
                f"{spec.name!r} cannot be tried without inputs{because(error)}"
            ) from error
        _check_history(spec, model, inputs)

    with contextlib.suppress(NotRunError):
        of_one_that_runs(spec.source, probe)


def _check_history(spec: EncoderSpec, model: nn.Module, inputs: Mapping[str, Any]) -> None:
    def run(stage: nn.Module, other: bool) -> torch.Tensor:
        shown = copy.deepcopy(dict(inputs))
        output = stage(**(other_values(shown) if other else shown))
        tensors = [value.flatten().float() for _, value in _tensors(fields(output), "")]
        return torch.cat(tensors) if tensors else torch.zeros(0)

    with contextlib.suppress(NotRunError):  # fails in training mode: the first batch reports it
        check_history(spec.name, model, spec.source.trains, run)


def _dropped(model: nn.Module, output: Any, picked: torch.Tensor) -> Iterator[str]:
    parameters = dict(model.named_parameters())
    behind = _behind(picked, parameters)
    for where, value in _tensors(fields(output), ""):
        if value is picked or not value.requires_grad or _is_summary(value, picked):
            continue
        if names := sorted(_behind(value, parameters) - behind):
            ellipsis = ", ..." if len(names) > _SHOWN else ""
            yield f"{where} {tuple(value.shape)} (of {', '.join(names[:_SHOWN])}{ellipsis})"


def _behind(value: torch.Tensor, parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Return the parameters that a tensor depends on."""
    if not value.requires_grad:
        return set()
    gradients = torch.autograd.grad(
        value.sum(), list(parameters.values()), retain_graph=True, allow_unused=True
    )
    return {
        name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None
    }


def _tensors(value: Any, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, tuple | list):
        for n, item in enumerate(value):
            yield from _tensors(item, f"{where}[{n}]")


def _is_summary(value: torch.Tensor, picked: torch.Tensor) -> bool:
    """Return True if a tensor has at most one vector per item, and the other has more."""
    if value.dim() == 0 or picked.dim() < 3 or len(value) != len(picked):
        return False
    return sum(size > 1 for size in value.shape[1:]) <= 1
