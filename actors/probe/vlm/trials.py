"""Small copies of a Hugging Face VLM's modules, called as stages call them, and inputs of trials.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from raymm.actors.modules.brief_error import because
from raymm.actors.probe.cut import ghost_inputs, of_one_that_runs
from raymm.actors.probe.small_model import trial_copy
from raymm.actors.probe.vlm.towers import Tower, as_copied
from raymm.actors.stages.features import Form, ReceivedFeatures
from raymm.actors.stages.tower import TowerSpec
from raymm.actors.stages.vlm_language import VlmLanguageSpec
from raymm.actors.weights.model_part import PartSource
from raymm.errors import USER_CODE_RAISES, NotRunError

Inputs = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]
# Relative change of numbers in the second copy.
_CHANGE = 0.3


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


def twice(inputs: Mapping[str, Any], towers: tuple[Tower, ...]) -> dict[str, Any]:
    """Return a batch with its rows and their items doubled."""
    entries = {entry for tower in towers for _, entry in tower.arguments}
    rows, length = inputs["input_ids"].shape[:2]
    doubled = {}
    for name, value in inputs.items():
        dim: int | None = 0
        if name not in entries:
            pairs = range(value.dim() - 1)
            dim = next((d for d in pairs if value.shape[d : d + 2] == (rows, length)), None)
        doubled[name] = value if dim is None else twice_along(value, dim)
    return doubled


def twice_along(value: Any, dim: int) -> Any:
    """Double a tensor along a dimension, with slightly different floats; zeros stay zeros.

    Equal copies would hide averages over, or attention to, both.
    """
    if not isinstance(value, torch.Tensor):
        return value
    changed = value
    if value.is_floating_point():
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        changed = value * (1 + _CHANGE * noise).to(value)
    return torch.cat([value, changed], dim)


def leaves_out_zeros(spec: TowerSpec, inputs: Inputs) -> bool:
    """Return True if all-zero items (padding) give no features, independent of other items."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    if len({len(value) for value in tensors.values()}) != 1:
        return False  # items of different sizes are not padded
    padded = {**inputs, **{
        name: torch.cat([value, torch.zeros_like(value[:1])]) for name, value in tensors.items()
    }}  # fmt: skip

    def probe(model: nn.Module) -> bool:
        trial = TowerTrial(spec, model, inputs)
        with torch.no_grad():
            try:
                due = trial.read(trial_copy(model), trial.inputs)
            except USER_CODE_RAISES as error:  # whatever a model may raise
                raise NotRunError(f"it does not run on the example{because(error)}") from error
            try:
                features = trial.read(trial_copy(model), padded)
            except USER_CODE_RAISES:  # rejects such items
                return False
        return features.shape == due.shape and torch.equal(features, due)

    return of_one_that_runs(spec.source, probe)
