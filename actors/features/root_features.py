"""Features of a frozen part of a module that runs once within its forward: what the part returns,
item by item, so that it need not run for items whose features are known.

The part is a submodule, in place of whose forward a :class:`RootCall` stands. It returns what the
forward does, or, of items that are known, their features put together; so all that the module does
before and after (projectors, mergers) stays its own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from raymm.errors import ForwardLeft, ModelError

FEATURE = "raymm_features/"
"""How names of features among a tower's inputs begin; what follows is their number."""


@dataclass(frozen=True)
class RootForm:
    """What a part returns.

    Attributes:
        place: dotted name of the part.
        tree: structure of what it returns.
        values: per leaf, what is there if it is no tensor.
        kept: numbers of leaves that are read.
        dim: along which those of several items are put together.
        zeros_left_out: whether items of nothing but zeros are padding, of which nothing comes.
    """

    place: str
    tree: TreeSpec
    values: tuple[Any, ...]
    kept: tuple[int, ...]
    dim: int = 0
    zeros_left_out: bool = False

    def features(self, output: Any) -> list[torch.Tensor]:
        """What is read of an output.

        Raises:
            ModelError: it is of another structure, or has other values.
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
        """Features of several items as those of one output.

        Args:
            items: of each, what :meth:`features` returned.

        Raises:
            ModelError: items whose features differ in size beside :attr:`dim`.
        """
        try:
            return [torch.cat(parts, self.dim) for parts in zip(*items, strict=True)]
        except RuntimeError as error:
            raise ModelError(f"features of {self.place}: {error}") from None

    def output(self, features: Sequence[torch.Tensor]) -> Any:
        """An output with these features; None where nothing is read.

        Args:
            features: what :meth:`together` returned.
        """
        leaves = list(self.values)
        for number, tensor in zip(self.kept, features, strict=True):
            leaves[number] = tensor
        return tree_unflatten(leaves, self.tree)


class RootCall:
    """In place of a part's forward.

    Args:
        module: that has the part.
        place: dotted name of the part.

    Attributes:
        output: what to return instead of running; None: to run, and leave the module's forward
            by :class:`ForwardLeft`.
    """

    def __init__(self, module: nn.Module, place: str) -> None:
        part = module.get_submodule(place)
        self._forward = part.forward
        self.output: Any = None
        vars(part)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.output is None:
            raise ForwardLeft(self._forward(*args, **kwargs))
        return self.output
