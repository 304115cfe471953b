"""Selection of the parameters of a module that a process holds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from raymm.actors.modules.cut import CutInfo, ghost_parameter, prune, stage_parameters


@dataclass(frozen=True)
class Part:
    """Parameters of blocks [lo, hi) and, by ``info``, around them, restricted to the names
    ``among``. If ``info`` is None, the module is not cut; if ``among`` is None, all names are
    included."""

    info: CutInfo | None
    lo: int = 0
    hi: int = 0
    among: Collection[str] | None = None

    def owned(self, module: nn.Module) -> list[str]:
        """Return the names of the parameters."""
        names = [name for name, _ in module.named_parameters()]
        if self.info is not None:
            names = stage_parameters(module, self.info, self.lo, self.hi)
        return names if self.among is None else [name for name in names if name in self.among]

    def prune(self, module: nn.Module) -> None:
        """Reduce a module to the parameters, in place."""
        if self.among is not None:
            keep_parameters(module, self.among)
        if self.info is not None:
            prune(module, self.info, self.lo, self.hi)


def keep_parameters(module: nn.Module, names: Collection[str]) -> nn.Module:
    """Replace all parameters except ``names`` by ghosts, in place."""
    kept = {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in names}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) not in kept:
            ghost_parameter(module, name)
    return module
