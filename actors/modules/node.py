"""A node of a graph of modules: a module, what it reads, what it hands on.

The same call in one process (the reference) and in those of a run. Samples are in dimension 0
of every tensor.
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

# The name of an output that is one tensor.
ONLY = ""
# The keyword by which a module that reads every sample is told which are its own.
OWN = "own"
# What a loss that others read returns its samples' losses as.
LOSS = "loss"

Tensors = dict[str, torch.Tensor]


class Input(NamedTuple):
    """A keyword argument that another node makes.

    Attributes:
        keyword: of the module's forward.
        producer: the node.
        output: which of its outputs; None: what it returned as a whole.
        every: all samples of the batch, not only the node's own. The module is then also given
            ``own``, the slice of them that are.
    """

    keyword: str
    producer: str
    output: str | None = None
    every: bool = False


@dataclass(frozen=True)
class NodeSpec:
    """A node as data that a process can build it from.

    Attributes:
        name: of it.
        entries: (keyword, entry of the batch) pairs.
        inputs: what other nodes make.
        outputs: names to hand on of those that the module returns; all if empty.
        postprocess: ``f(arguments, output) -> output`` after the module.
        loss: it returns losses (b,), one per sample of its own; one that has ``outputs``, which
            others read, as :data:`LOSS`.
        draws: whether it draws random numbers; None: if it is in training mode.
        noise: (keyword, what is drawn) pairs.
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
    """Run a node on its own samples.

    Args:
        spec: of the node.
        module: its module.
        entries: of the batch, by entry; own samples.
        inputs: outputs by producer; own samples.
        every: outputs by producer; all samples of the batch.
        own: the node's samples, in the batch.
        seeds: of noise; None for those of the first batch.

    Returns:
        What it hands on, by name; losses (b,) under :data:`ONLY`.

    Raises:
        ModelError: an output that is not there, is no tensor, or has not ``own.size`` samples; an
            input that was changed in place.
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
    """A module's keyword arguments. Arguments as of :func:`call`.

    Raises:
        ModelError: it reads an output that is not there.
        InputError: noise is like an argument that is no tensor.
    """
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
    """
    Raises:
        ModelError: an input was changed in place meanwhile.
    """
    read = [(o.keyword, t) for o in spec.inputs for t in tensors_in(arguments[o.keyword])]
    before = [_version(tensor) for _, tensor in read]
    yield
    for (keyword, tensor), version in zip(read, before, strict=True):
        # Others read the same memory: what they see would depend on who is first.
        if _version(tensor) != version:
            raise ModelError(
                f"{spec.name!r} changes its input {keyword!r} in place; accepted: modules that do "
                "not change their inputs (inplace=False)"
            )


def outputs_of(spec: NodeSpec, output: Any, samples: int | None = None) -> Tensors:
    """What a node hands on of what its module returned, by name; losses (b,) under :data:`ONLY`.

    Args:
        spec: of the node.
        output: of its module, after ``postprocess``.
        samples: how many there are; None if it is not known.

    Raises:
        ModelError: as of :func:`call`.
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
    """How often it was changed in place; tensors of inference mode do not count that."""
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
