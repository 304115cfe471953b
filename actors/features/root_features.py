"""Features of a frozen part of a module that runs once within its forward. The part's outputs are
stored per item, so that the part need not run for items with stored features.

A :class:`RootCall` replaces the forward of the part, which is a submodule. It returns the part's
output, or the joined features of known items. Everything that the module does before and after
(projectors, mergers) remains its own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from raymm.errors import ForwardLeft, ModelError

FEATURE = "raymm_features/"
"""Prefix of the names of features among a tower's inputs, followed by their number."""


@dataclass(frozen=True)
class RootForm:
    """Form of a part's output.

    Attributes:
        values: per leaf, its value if it is not a tensor.
        kept: indices of the leaves that are used.
        dim: dimension along which items are concatenated.
        zeros_left_out: True if items of only zeros are padding without output.
    """

    place: str
    tree: TreeSpec
    values: tuple[Any, ...]
    kept: tuple[int, ...]
    dim: int = 0
    zeros_left_out: bool = False

    def features(self, output: Any) -> list[torch.Tensor]:
        """Return the used leaves of an output.

        Raises:
            ModelError: the output has another structure or other values.
        """
        leaves, tree = tree_flatten(output)
        values = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        if tree != self.tree or values != self.values:
            raise ModelError(
                f"the output of {self.place} has structure {tree} with {values}; expected "
                f"{self.tree} with {self.values}"
            )
        return [leaves[n] for n in self.kept]

    def together(self, items: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Concatenate the features of several items as in one output.

        Raises:
            ModelError: items differ in a dimension other than :attr:`dim`.
        """
        try:
            return [torch.cat(tensors, self.dim) for tensors in zip(*items, strict=True)]
        except RuntimeError as error:
            raise ModelError(f"features of {self.place}: {error}") from None

    def output(self, features: Sequence[torch.Tensor]) -> Any:
        """Return an output with these features; unused tensors are None."""
        leaves = list(self.values)
        for number, tensor in zip(self.kept, features, strict=True):
            leaves[number] = tensor
        return tree_unflatten(leaves, self.tree)


class RootCall:
    """Replacement of a part's forward. Outside :meth:`returning`, it runs the part and leaves the
    module's forward with the part's output, through :class:`ForwardLeft`."""

    def __init__(self, module: nn.Module, place: str) -> None:
        submodule = module.get_submodule(place)
        self._forward = submodule.forward
        self._output: Any = None
        vars(submodule)["forward"] = self

    @contextmanager
    def returning(self, output: Any) -> Iterator[None]:
        """Context manager for forwards in which the part returns ``output`` without running."""
        self._output = output
        try:
            yield
        finally:
            self._output = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._output is None:
            raise ForwardLeft(self._forward(*args, **kwargs))
        return self._output
