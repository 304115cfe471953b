"""Probe of state (:mod:`raymm.actors.probe.history`) for modules of a Hugging Face VLM."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from raymm.actors.probe.cut import of_one_that_runs
from raymm.actors.probe.history import check_history, other_values
from raymm.actors.probe.vlm.towers import Tower
from raymm.actors.probe.vlm.trials import LanguageTrial, TowerTrial, twice, twice_along
from raymm.actors.stages.tower import TowerSpec
from raymm.actors.stages.vlm_language import VlmLanguageSpec
from raymm.actors.weights.model_part import PartSource
from raymm.errors import NotRunError

Inputs = Mapping[str, Any]
Run = Callable[[nn.Module], torch.Tensor]
_MORE = 5  # additional tokens of a longer text


def check_vlm_history(
    spec: VlmLanguageSpec | TowerSpec, towers: tuple[Tower, ...], inputs: Inputs
) -> None:
    """Check that results do not depend on earlier forwards: other numbers, rows, items or lengths.

    Raises:
        ProbeError: a forward depends on earlier forwards.
    """
    if isinstance(spec, VlmLanguageSpec):
        of_one_that_runs(
            cast(PartSource, spec.source).whole,
            lambda whole: _check_language(spec, towers, whole, inputs),
        )
    else:
        of_one_that_runs(spec.source, lambda model: _check_tower(spec, model, inputs))


def _check_language(
    spec: VlmLanguageSpec, towers: tuple[Tower, ...], whole: nn.Module, inputs: Inputs
) -> None:
    trial = LanguageTrial(spec, towers, whole, inputs)
    for changed in (_longer(inputs, towers), twice(inputs, towers)):
        with contextlib.suppress(NotRunError):  # a tower fails on these inputs
            changed_trial = LanguageTrial(spec, towers, whole, changed)
            _check(spec, trial.model, partial(trial.logits, features=trial.features),
                   partial(changed_trial.logits, features=changed_trial.features))


def _check_tower(spec: TowerSpec, model: nn.Module, inputs: Inputs) -> None:
    trial = TowerTrial(spec, model, inputs)
    several = {name: twice_along(value, 0) for name, value in trial.inputs.items()}
    for changed in (other_values(trial.inputs), several):
        _check(spec, model, partial(trial.read, inputs=trial.inputs),
               partial(trial.read, inputs=changed))


def _check(spec: VlmLanguageSpec | TowerSpec, model: nn.Module, run: Run, other: Run) -> None:
    trains = spec.source.trains
    with contextlib.suppress(NotRunError):  # fails on the other inputs, or in training mode
        check_history(
            spec.name, model, trains, lambda stage, is_other: (other if is_other else run)(stage)
        )


def _longer(inputs: Inputs, towers: tuple[Tower, ...]) -> dict[str, Any]:
    """Return a batch whose rows repeat their last token."""
    entries = {entry for tower in towers for _, entry in tower.arguments}
    shape = tuple(inputs["input_ids"].shape[:2])
    longer = {}
    for name, value in inputs.items():
        dim = None
        if name not in entries and isinstance(value, torch.Tensor):
            pairs = range(value.dim() - 1)
            dim = next((d + 1 for d in pairs if value.shape[d : d + 2] == shape), None)
        if dim is not None:
            last = value.narrow(dim, shape[1] - 1, 1)
            value = torch.cat([value, *[last] * _MORE], dim)
        longer[name] = value
    return longer
