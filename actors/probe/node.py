"""Probe of a graph module by all of its outputs; see :mod:`raymm.actors.probe.callbacks`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from raymm.actors.modules.message import Read, first_tensor
from raymm.actors.modules.node import OWN, outputs_of
from raymm.actors.probe.callbacks import Cuts, probe_chain
from raymm.actors.stages.encoder import EncoderSpec
from raymm.actors.stages.language import LanguageSpec
from raymm.actors.stages.node import NodeStageSpec
from raymm.actors.stages.stage_inputs import fields
from raymm.errors import ProbeError

_ONE_STAGE = "give it one stage (pp 1)"


def probe_node(
    spec: NodeStageSpec, cuts: Cuts, example: Mapping[str, Any] | None = None,
    with_gradient: Collection[str] = (),
) -> NodeStageSpec:
    """Return the spec with the settings that the stages of a cut module need.

    ``with_gradient`` names modules whose outputs have a gradient; ``example`` is guessed if None.

    Raises:
        ProbeError: the module cannot be cut, or later stages read an output of another module that
            is not a port.
    """
    node = spec.node
    if not cuts or node is None:
        return spec
    if producers := [use.producer for use in node.inputs if use.every]:
        raise ProbeError(
            f"{spec.name!r} reads every() of {producers[0]!r} and takes its {OWN!r} samples as an "
            f"argument, which later stages do not receive; {_ONE_STAGE}"
        )
    if spec.chain:
        if node.postprocess is not None:
            raise ProbeError(
                f"{spec.name!r} is cut, but the postprocess of its DagModule reads inputs that "
                "only its first stage has; give the ModalityModule a callback instead"
            )
        probed = probe_chain(spec, cuts, example)
    else:
        # As a chain whose features are the concatenation of all outputs.
        plain = EncoderSpec(
            spec.name, spec.source, spec.num_blocks,
            postprocess_module=partial(_handed_on, spec),
        )
        probed = probe_chain(plain, cuts, example, read_of(spec))
    producer_of = {use.keyword: use.producer for use in node.inputs}
    travels = probed.travels - {port.name for port in spec.ports}
    for keyword in sorted(travels & producer_of.keys()):
        if producer_of[keyword] in with_gradient:
            raise ProbeError(
                f"later stages of {spec.name!r} read {keyword!r} of {producer_of[keyword]!r}, but "
                f"without a gradient it is unknown which of their layers do; {_ONE_STAGE}"
            )
    return replace(spec, cut=probed.cut, travels=travels, lost=probed.lost)


def read_of(spec: EncoderSpec | LanguageSpec) -> Read:
    """Return the function that selects the outputs of a module that probes compare."""
    if not isinstance(spec, NodeStageSpec) or spec.node is None or spec.chain:
        return first_tensor
    node = spec.node
    names = () if node.postprocess or node.loss else node.outputs
    return partial(_flat_fields, names)


def _handed_on(spec: NodeStageSpec, inputs: dict[str, Any], output: Any) -> torch.Tensor:
    assert spec.node is not None
    if spec.node.postprocess is not None:
        output = spec.node.postprocess(inputs, output)
    return _flat(outputs_of(spec.node, output).values())


def _flat_fields(names: Collection[str], output: Any) -> torch.Tensor:
    """Concatenate the named fields of a module's output; all floating-point tensors without names.
    """
    by_name = fields(output)
    return _flat(by_name[name] for name in names or by_name if name in by_name)


def _flat(values: Iterable[Any]) -> torch.Tensor:
    tensors = [t for t in values if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
