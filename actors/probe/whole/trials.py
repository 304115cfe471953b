"""Small copies of a whole model's modules, called as stages call them: its language model with
features of its towers, a tower as the model's forward calls it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from raymm.actors.modules.brief_error import because
from raymm.actors.probe.cut import ghost_inputs
from raymm.actors.probe.whole.towers import Tower, as_copied
from raymm.actors.stages.features import Form, ReceivedFeatures
from raymm.actors.stages.tower import TowerSpec
from raymm.actors.stages.whole_language import WholeLanguageSpec
from raymm.actors.weights.model_part import PartSource
from raymm.errors import USER_CODE_RAISES, NotRunError

Inputs = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]


class LanguageTrial:
    """A whole model without its towers, and what these hand it of an example.

    Args:
        spec: of the language model.
        towers: that it reads.
        whole: a small copy of the whole model.
        inputs: of the whole model.

    Attributes:
        model: the copy without its towers.
        features: what they hand over, by tower and number.

    Raises:
        NotRunError: a tower does not run on the inputs.
    """

    def __init__(
        self, spec: WholeLanguageSpec, towers: tuple[Tower, ...], whole: nn.Module, inputs: Inputs
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
        """What the model, or a part of it, returns.

        Args:
            stage: a copy of the model.
            features: as :attr:`features`, maybe of other values.
        """
        for port in self._ports:
            form, tensors, side = self._outputs[port.name]
            own = [features[f"{port.name}/{n}"] for n in range(len(tensors))]
            received = cast(ReceivedFeatures, port.call.of(stage))
            received.output = form.unpacked(own, side)
        return stage(**self._shown, use_cache=False).logits


class TowerTrial:
    """How a tower is called, and what is read of what it returns.

    Args:
        spec: of the tower.
        model: a small copy of it.
        inputs: of the tower.

    Attributes:
        inputs: as the copy takes them.
    """

    def __init__(self, spec: TowerSpec, model: nn.Module, inputs: Inputs) -> None:
        assert spec.form is not None  # it was found by being called
        self._form, self._constants = spec.form, dict(spec.constants)
        self.inputs = as_copied(spec.source, model, inputs)

    def packed(
        self, stage: nn.Module, inputs: Inputs
    ) -> tuple[Form, tuple[torch.Tensor, ...], Tensors]:
        """Of what the tower, or a part of it, returns: its form, and what travels.

        Args:
            stage: a copy of the tower.
            inputs: as :attr:`inputs`, maybe of other values.
        """
        output = stage(**inputs, **self._constants)
        form = self._form.like(output)
        return form, *form.packed(output)

    def read(self, stage: nn.Module, inputs: Inputs) -> torch.Tensor:
        """(n,), all numbers that travel with a gradient."""
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
