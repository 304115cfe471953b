"""Probe of the frozen part of a tower: can its features be cached, and which are read?

A small copy runs on single items; then their features replace the part, and results must equal
those of the original tower. Gradients, at the tower's own depth, show which outputs of the part are
read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from raymm.actors.features.root_features import RootCall, RootForm
from raymm.actors.modules.brief_error import because
from raymm.actors.probe.cut import of_one_that_runs
from raymm.actors.probe.small_model import trial_copy
from raymm.actors.probe.vlm.cut import run_without_values
from raymm.actors.probe.vlm.trials import TowerTrial, leaves_out_zeros, twice_along
from raymm.actors.stages.tower import TowerSpec, features_of_items, of_outlines, outlines
from raymm.actors.weights.model_part import PartSource
from raymm.errors import USER_CODE_RAISES, ForwardLeft, ModelError, NotRunError, ProbeError

# Relative tolerance; matrix products of other sizes are not exactly equal.
_NOISE = 1e-5
_DIMENSIONS = 2  # dimensions in which features of items may be concatenated
Inputs = Mapping[str, Any]
_CPU = torch.device("cpu")


def probe_root(spec: TowerSpec, place: str, inputs: Inputs) -> RootForm:
    """Return the structure of the features that a tower's frozen part ``place`` returns.

    Raises:
        ProbeError: an item's features depend on other items, or the code after the part reads more
            than its features.
    """
    zeros = leaves_out_zeros(spec, inputs)
    several = {name: twice_along(value, 0) for name, value in inputs.items()}

    def probe(model: nn.Module) -> int:
        return _Trial(spec, place, model, several, zeros).dim()

    dim = of_one_that_runs(spec.source, probe)
    return replace(_in_own_depth(spec, place, inputs), dim=dim, zeros_left_out=zeros)


class _Trial:
    """Small copy of a tower, with several items."""

    def __init__(
        self, spec: TowerSpec, place: str, model: nn.Module, inputs: Inputs, zeros: bool
    ) -> None:
        self._trial = TowerTrial(spec, model, inputs)
        self._spec, self._place, self._model = spec, place, model
        self._constants, self._zeros = dict(spec.constants), zeros

    def dim(self) -> int:
        """Return the dimension in which features of items are concatenated.

        Raises:
            ProbeError: see :func:`probe_root`.
            NotRunError: the copy does not run.
        """
        inputs, name = self._trial.inputs, type(self._model).__name__
        try:
            with torch.no_grad():
                due = self._trial.read(trial_copy(self._model), inputs)
            root_output = _root_output(self._model, self._spec, self._place, inputs)
            form = _read_form(self._model, self._spec, self._place, inputs, root_output)
        except USER_CODE_RAISES as error:  # whatever a model may raise
            raise NotRunError(f"{name} does not run on the example{because(error)}") from error
        form = replace(form, zeros_left_out=self._zeros)
        try:
            items = features_of_items(
                self._of(form)[0], form, self._spec.name, inputs, self._constants
            )
            expected = form.features(root_output)
        except ModelError as error:
            raise ProbeError(str(error)) from error
        except USER_CODE_RAISES as error:  # whatever a model may raise
            raise ProbeError(f"{name} does not run on one item{because(error)}") from error
        for dim in range(_DIMENSIONS):
            form = replace(form, dim=dim)
            if self._is_of(form, items, expected):
                self._check(form, items, due)
                return dim
        raise ProbeError(f"single items give other features of {self._place} than a batch of items")

    def _of(self, form: RootForm) -> tuple[nn.Module, RootCall]:
        model = trial_copy(self._model)
        call = RootCall(model, form.place)
        cast(PartSource, self._spec.source).called(model)
        return model, call

    def _is_of(
        self, form: RootForm, items: Sequence[Sequence[torch.Tensor]],
        expected: Sequence[torch.Tensor],
    ) -> bool:  # fmt: skip
        try:
            together = form.together(items)
        except (ModelError, IndexError):
            return False
        return all(_alike(a, b) for a, b in zip(together, expected, strict=True))

    def _check(
        self, form: RootForm, items: Sequence[Sequence[torch.Tensor]], due: torch.Tensor
    ) -> None:
        """Raise ProbeError if the code after the part gives another result for cached features."""
        model, call = self._of(form)
        cached = form.output(form.together(items))
        shown = of_outlines(outlines(self._spec.name, self._trial.inputs), _CPU)
        try:
            with torch.no_grad(), call.returning(cached):
                features = self._trial.read(model, shown)
        except USER_CODE_RAISES as error:  # whatever a model may raise
            raise ProbeError(
                f"the code after {form.place} reads more than its features{because(error)}"
            ) from error
        if not _alike(features, due):
            raise ProbeError(
                f"the code after {form.place} reads more than its features: with them alone its "
                "result differs"
            )


def _alike(own: torch.Tensor, due: torch.Tensor) -> bool:
    if own.shape != due.shape:
        return False
    if not due.is_floating_point():
        return torch.equal(own, due)
    return bool((own - due).norm() <= _NOISE * due.norm())


def _root_output(model: nn.Module, spec: TowerSpec, place: str, inputs: Inputs) -> Any:
    """Return the output of the part within the tower's forward, or raise ProbeError if it is not
    called."""
    model = trial_copy(model)
    RootCall(model, place)
    cast(PartSource, spec.source).called(model)
    try:
        with torch.no_grad():
            model(**inputs, **dict(spec.constants))
    except ForwardLeft as reached:
        return reached.value
    raise ProbeError(f"{place} is not called")


def _read_form(
    model: nn.Module, spec: TowerSpec, place: str, inputs: Inputs, output: Any
) -> RootForm:
    """Return the form of an output, with the floats that get a gradient, and all other tensors."""
    model = trial_copy(model)
    call = RootCall(model, place)
    cast(PartSource, spec.source).called(model)
    leaves, tree = tree_flatten(output)
    shown = [_leaf(leaf) for leaf in leaves]
    cached = tree_unflatten(
        [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in shown], tree
    )
    with call.returning(cached):
        read = TowerTrial(spec, model, inputs).read(model, inputs)
    return _form_of(place, tree, shown, read)


def _leaf(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach().clone()
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def _form_of(place: str, tree: Any, leaves: Sequence[Any], read: torch.Tensor) -> RootForm:
    floats = [
        n for n, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    gradients = torch.autograd.grad(read.sum(), [leaves[n] for n in floats], allow_unused=True)
    unread = {n for n, gradient in zip(floats, gradients, strict=True) if gradient is None}
    read_indices = tuple(
        n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and n not in unread
    )
    values = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return RootForm(place, tree, values, read_indices)


def _in_own_depth(spec: TowerSpec, place: str, inputs: Inputs) -> RootForm:
    """Return the form of the part's output at the tower's own size, without running its blocks."""
    forms: list[RootForm] = []

    def run(model: nn.Module) -> torch.Tensor:
        trial = TowerTrial(spec, model, inputs)
        submodule = model.get_submodule(place)
        original, leaves, trees = submodule.forward, [], []

        def forward(*args: Any, **kwargs: Any) -> Any:
            values, tree = tree_flatten(original(*args, **kwargs))
            leaves.extend(map(_leaf, values))
            trees.append(tree)
            return tree_unflatten(
                [v.clone() if isinstance(v, torch.Tensor) else v for v in leaves], tree
            )

        vars(submodule)["forward"] = forward
        cast(PartSource, spec.source).called(model)
        read = trial.read(model, trial.inputs)
        forms.append(_form_of(place, trees[0], leaves, read))
        return read.detach()

    try:
        run_without_values(cast(PartSource, spec.source), run)
    except USER_CODE_RAISES as error:  # whatever a model may raise
        raise ProbeError(
            f"{spec.name} does not run on shapes without values{because(error)}"
        ) from error
    return forms[-1]
