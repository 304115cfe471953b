"""Which of a module's parameters a process has: of some blocks, of a part of the model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from raymm.actors.modules.cut import CutInfo, ghost_parameter, prune, stage_parameters


@dataclass(frozen=True)
class Part:
    """Some of a module's parameters.

    Attributes:
        info: how the module is cut; None if it is not.
        lo, hi: blocks [lo, hi); what ``info`` says surrounds them comes along.
        among: names that the parameters are among; None for any.
    """

    info: CutInfo | None
    lo: int = 0
    hi: int = 0
    among: Collection[str] | None = None

    def owned(self, module: nn.Module) -> list[str]:
        """Their names."""
        names = [name for name, _ in module.named_parameters()]
        if self.info is not None:
            names = stage_parameters(module, self.info, self.lo, self.hi)
        return names if self.among is None else [name for name in names if name in self.among]

    def prune(self, module: nn.Module) -> None:
        """Reduce a module, in place, to them."""
        if self.among is not None:
            keep_parameters(module, self.among)
        if self.info is not None:
            prune(module, self.info, self.lo, self.hi)


def keep_parameters(module: nn.Module, names: Collection[str]) -> nn.Module:
    """The module, whose other parameters have become ghosts."""
    kept = {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in names}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) not in kept:
            ghost_parameter(module, name)
    return module
