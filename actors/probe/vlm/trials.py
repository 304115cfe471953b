"""Small copies of a Hugging Face VLM's modules, called as stages call them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from raymm.actors.modules.brief_error import because
from raymm.actors.probe.cut import ghost_inputs
from raymm.actors.probe.vlm.towers import Tower, as_copied
from raymm.actors.stages.features import Form, ReceivedFeatures
from raymm.actors.stages.tower import TowerSpec
from raymm.actors.stages.vlm_language import VlmLanguageSpec
from raymm.actors.weights.model_part import PartSource
from raymm.errors import USER_CODE_RAISES, NotRunError

Inputs = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]


class LanguageTrial:
    """Hugging Face VLM without its towers, and the towers' features for an example.

    Args:
        towers: towers that the language model reads.
        whole: a small copy of the complete VLM.
        inputs: inputs of the VLM.

    Attributes:
        model: the copy without its towers.
        features: the towers' features, by tower and number.

    Raises:
        NotRunError: a tower does not run on the inputs.
    """

    def __init__(
        self, spec: VlmLanguageSpec, towers: tuple[Tower, ...], whole: nn.Module, inputs: Inputs
    ) -> None:
        source = cast(PartSource, spec.source)
        shown = as_copied(source.whole, whole, inputs)
        self._ports = spec.towers
        self._outputs = {tower.name: _features(whole, tower, shown) for tower in towers}
        self.model = source.as_made(copy.deepcopy(whole))
        for port in spec.towers:
            port.call.replace(self.model, ReceivedFeatures(port.name))
        entries = {entry for tower in towers for _, entry in tower.arguments}
        self._shown = {
            **{name: value for name, value in shown.items() if name not in entries},
            **ghost_inputs({name: value for name, value in shown.items() if name in entries}),
        }
        self.features: Tensors = {
            f"{name}/{n}": tensor
            for name, (_, tensors, _) in self._outputs.items() for n, tensor in enumerate(tensors)
        }  # fmt: skip

    def logits(self, stage: nn.Module, features: Tensors) -> torch.Tensor:
        """Return the logits of a copy of the model, or of a part, for features like
        :attr:`features`."""
        for port in self._ports:
            form, tensors, side = self._outputs[port.name]
            port_features = [features[f"{port.name}/{n}"] for n in range(len(tensors))]
            received = cast(ReceivedFeatures, port.call.of(stage))
            received.receive(form.unpacked(port_features, side))
        return stage(**self._shown, use_cache=False).logits


class TowerTrial:
    """Small copy of a tower, called like in a stage; ``inputs`` are those of the copy."""

    def __init__(self, spec: TowerSpec, model: nn.Module, inputs: Inputs) -> None:
        assert spec.form is not None  # set by the tower's probe
        self._form, self._constants = spec.form, dict(spec.constants)
        self.inputs = as_copied(spec.source, model, inputs)

    def packed(
        self, stage: nn.Module, inputs: Inputs
    ) -> tuple[Form, tuple[torch.Tensor, ...], Tensors]:
        """Return the form of the output of the tower, or a part, and the tensors that are sent."""
        output = stage(**inputs, **self._constants)
        form = self._form.like(output)
        return form, *form.packed(output)

    def read(self, stage: nn.Module, inputs: Inputs) -> torch.Tensor:
        """Return (n,), all numbers that are sent with a gradient."""
        return torch.cat([tensor.flatten() for tensor in self.packed(stage, inputs)[1]])


def _features(
    whole: nn.Module, tower: Tower, inputs: Inputs
) -> tuple[Form, tuple[torch.Tensor, ...], Tensors]:
    model = copy.deepcopy(whole)
    try:
        with torch.no_grad():
            output = tower.output(model, tower.inputs(inputs) or {})
        form = tower.form.like(output)
        if len(form.leaves) != len(tower.form.leaves):
            raise ValueError("its features are of fewer blocks than the model's")
        return form, *form.packed(output)
    except USER_CODE_RAISES as error:  # whatever a model may raise
        raise NotRunError(
            f"{tower.call} of {type(whole).__name__} does not run on the example{because(error)}"
        ) from error
