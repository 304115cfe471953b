"""Node of a module graph, in the single-process reference and in a run's processes.

Samples are in dimension 0 of every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from raymm.actors.modules.noise import Noise, SampleSeeds, drawn
from raymm.actors.quota.work import tensors_in
from raymm.errors import ModelError
from raymm.scheduler.graph.sample_ranges import Range

# Output name of a module that returns a single tensor.
ONLY = ""
# Keyword argument with the node's slice of samples, for modules that read all samples.
OWN = "own"
# Output name of the losses, for losses with further outputs.
LOSS = "loss"

Tensors = dict[str, torch.Tensor]


class Input(NamedTuple):
    """Keyword argument that another node computes.

    Attributes:
        output: output of the producer; None for its entire return value.
        every: read all samples of the batch. The module then also gets ``own``, the slice of the
            node's samples.
    """

    keyword: str
    producer: str
    output: str | None = None
    every: bool = False


@dataclass(frozen=True)
class NodeSpec:
    """Description of a node; a process builds the node from it.

    Attributes:
        entries: (keyword, batch entry) pairs.
        outputs: names of the module's outputs that are passed to other nodes; all if empty.
        postprocess: ``f(arguments, output) -> output`` after the module.
        loss: the module returns losses (b,) per sample; with ``outputs``, under :data:`LOSS`.
        draws: True if it draws random numbers; None if it draws only in training mode.
        noise: (keyword, distribution) pairs.
    """

    name: str
    entries: tuple[tuple[str, str], ...] = ()
    inputs: tuple[Input, ...] = ()
    outputs: tuple[str, ...] = ()
    postprocess: Callable[[dict[str, Any], Any], Any] | None = None
    loss: bool = False
    draws: bool | None = None
    noise: tuple[tuple[str, Noise], ...] = ()


def call(
    spec: NodeSpec,
    module: nn.Module,
    entries: Mapping[str, torch.Tensor],
    inputs: Mapping[str, Tensors],
    every: Mapping[str, Tensors],
    own: Range,
    seeds: SampleSeeds | None = None,
) -> Tensors:
    """Run a node on its own samples and return its outputs by name; losses (b,) under :data:`ONLY`.
    Raise a ``ModelError`` if an output is missing, is not a tensor, or does not have ``own.size``
    samples; or an input was changed in place.

    Args:
        entries: batch entries; own samples.
        inputs: outputs by producer; own samples.
        every: outputs by producer; all samples of the batch.
        own: the node's samples within the batch.
        seeds: seeds of noise; None for those of the first batch.
    """
    arguments = arguments_of(spec, entries, inputs, every, own, seeds)
    with inputs_left_alone(spec, arguments):
        output = module(**arguments)
        if spec.postprocess is not None:
            output = spec.postprocess(arguments, output)
    return outputs_of(spec, output, own.size)


def arguments_of(
    spec: NodeSpec,
    entries: Mapping[str, torch.Tensor],
    inputs: Mapping[str, Tensors],
    every: Mapping[str, Tensors],
    own: Range,
    seeds: SampleSeeds | None = None,
) -> dict[str, Any]:
    """Return a module's keyword arguments; parameters are those of :func:`call`. Raise a
    ``ModelError`` if the module reads a missing output, and an ``InputError`` if the noise has the
    shape of an argument that is not a tensor."""
    arguments: dict[str, Any] = {keyword: entries[entry] for keyword, entry in spec.entries}
    for use in spec.inputs:
        tensors = (every if use.every else inputs)[use.producer]
        arguments[use.keyword] = _chosen(spec.name, use, tensors)
    if any(use.every for use in spec.inputs):
        arguments[OWN] = slice(own.lo, own.hi)
    for keyword, noise in spec.noise:
        arguments[keyword] = drawn(
            noise, arguments, own, seeds or SampleSeeds(), spec.name, keyword
        )
    return arguments


@contextmanager
def inputs_left_alone(spec: NodeSpec, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Context manager that raises ModelError if a module changes its inputs in place."""
    read = [(o.keyword, t) for o in spec.inputs for t in tensors_in(arguments[o.keyword])]
    versions = [_version(tensor) for _, tensor in read]
    yield
    for (keyword, tensor), version in zip(read, versions, strict=True):
        # Other modules read the same memory, so their results would depend on the order of
        # execution.
        if _version(tensor) != version:
            raise ModelError(
                f"{spec.name!r} changes its input {keyword!r} in place; accepted: modules that do "
                "not change their inputs (inplace=False)"
            )


def outputs_of(spec: NodeSpec, output: Any, samples: int | None = None) -> Tensors:
    """Return a node's outputs by name, after ``postprocess``; losses (b,) under :data:`ONLY`.

    Raises:
        ModelError: see :func:`call`. The number of samples is not checked if ``samples`` is None.
    """
    outputs = _named(spec, output)
    for name, tensor in outputs.items():
        if not tensor.dim() or samples not in (None, tensor.shape[0]):
            raise ModelError(
                f"output {name or 'tensor'!r} of {spec.name!r} has shape {tuple(tensor.shape)} for "
                f"{samples} samples; accepted: samples in dimension 0"
            )
    if spec.loss and (list(outputs) != [ONLY, *spec.outputs] or outputs[ONLY].dim() != 1):
        shapes = {name: tuple(tensor.shape) for name, tensor in outputs.items()}
        raise ModelError(
            f"loss {spec.name!r} returns {shapes}; accepted: one tensor of shape "
            f"({'b' if samples is None else samples},), the losses of its samples"
        )
    return outputs


def _version(tensor: torch.Tensor) -> int:
    """Return the in-place version counter; inference-mode tensors have none (0)."""
    return 0 if tensor.is_inference() else tensor._version


def _chosen(node: str, entry: Input, tensors: Tensors) -> Any:
    if entry.output is not None:
        if entry.output not in tensors:
            raise ModelError(
                f"{node!r} reads output {entry.output!r} of {entry.producer!r}; accepted: "
                f"{', '.join(tensors)}"
            )
        return tensors[entry.output]
    if len(tensors) == 1:
        return next(iter(tensors.values()))
    if list(tensors) == [str(i) for i in range(len(tensors))]:
        return tuple(tensors.values())
    return dict(tensors)


def _named(spec: NodeSpec, output: Any) -> Tensors:
    if isinstance(output, torch.Tensor):
        outputs = {ONLY: output}
    elif isinstance(output, Mapping):
        outputs = {key: value for key, value in output.items() if value is not None}
    elif isinstance(output, tuple | list):
        outputs = {str(i): value for i, value in enumerate(output)}
    else:
        raise ModelError(
            f"{spec.name!r} returns {type(output).__name__}; accepted: a tensor, a tuple or a "
            "dictionary of tensors, or a postprocess function that makes one of them"
        )
    if missing := [name for name in spec.outputs if name not in outputs]:
        raise ModelError(
            f"{spec.name!r} does not return {missing}; accepted as outputs: {', '.join(outputs)}"
        )
    if spec.loss and LOSS in outputs:
        outputs = {ONLY: outputs[LOSS], **{name: outputs[name] for name in spec.outputs}}
    elif spec.outputs:
        outputs = {name: outputs[name] for name in spec.outputs}
    for name, value in outputs.items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(
                f"output {name!r} of {spec.name!r} is {type(value).__name__}; list the tensors to "
                "pass to other modules in outputs"
            )
    return outputs
