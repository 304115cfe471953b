"""Which layers of a module have something trainable; which parts of a whole model are frozen."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from raymm.actors.modules.blocks import block_list, find_blocks
from raymm.actors.probe.whole.towers import Tower

PROJECTOR = "projector"


def any_trainable(module: nn.Module) -> bool:
    """Whether anything in it is."""
    return any(p.requires_grad for p in module.parameters())


def trainable_blocks(module: nn.Module, count: int) -> tuple[bool, ...]:
    """Per block: is anything trainable in it? What is outside the blocks counts with the
    first and the last block (one of them owns it, or both if it is tied).

    Args:
        module: or its skeleton.
        count: of its blocks.
    """
    path = find_blocks(module)
    if path is None or count == 1:
        return (any_trainable(module),)
    flags = [any_trainable(block) for block in block_list(module, path)]
    if any(p.requires_grad for n, p in module.named_parameters() if not n.startswith(path + ".")):
        flags[0] = flags[-1] = True
    return tuple(flags)


@dataclass(frozen=True)
class FrozenParts:
    """Which parts of a whole model are not trained.

    Attributes:
        names: of towers, the projector, the language model.
    """

    names: frozenset[str]

    def places(self, tower: Tower) -> tuple[str, ...]:
        """Of a tower, the places that are not."""
        own = (tower.root,) if tower.name in self.names else ()
        if PROJECTOR in self.names:
            own += tuple(place for place in tower.places if place != tower.root)
        return own
