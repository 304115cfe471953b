"""All-zero items, with which processors pad samples that have fewer items."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raymm.actors.modules.brief_error import because
from raymm.actors.probe.cut import of_one_that_runs
from raymm.actors.probe.vlm.trials import TowerTrial
from raymm.actors.stages.tower import TowerSpec
from raymm.errors import USER_CODE_RAISES, NotRunError

Inputs = Mapping[str, Any]


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
                due = trial.read(copy.deepcopy(model), trial.inputs)
            except USER_CODE_RAISES as error:  # whatever a model may raise
                raise NotRunError(f"it does not run on the example{because(error)}") from error
            try:
                features = trial.read(copy.deepcopy(model), padded)
            except USER_CODE_RAISES:  # rejects such items
                return False
        return features.shape == due.shape and torch.equal(features, due)

    return of_one_that_runs(spec.source, probe)
