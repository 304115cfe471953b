"""Sources that train a few parameters of another source's module: adapters, or the embedding and
head rows of new tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from raymm.actors.adapters.lora import adapt, is_of_base, set_trained
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.adapters.new_rows import add_rows, is_new_rows
from raymm.actors.adapters.targets import find_targets
from raymm.actors.weights.model_part import is_within
from raymm.actors.weights.part import Part
from raymm.actors.weights.source import ModuleSource, set_mode


class _OverBase(ModuleSource):
    """Source whose module is that of ``base``, changed after it is built."""

    base: ModuleSource

    def check(self) -> list[str]:
        return self.base.check()

    @property
    def origin(self) -> ModuleSource:
        return self.base.origin

    @property
    def config(self) -> PretrainedConfig | None:
        return self.base.config


@dataclass(frozen=True)
class AdaptedSource(_OverBase):
    """Frozen module of another source, with adapters (initialised from ``seed``) in layers
    ``targets``.

    Attributes:
        places, outside: the part of the module that is frozen and gets adapters, see
            :class:`raymm.actors.weights.model_part.PartSource`; the entire module by default.
        apart: names of submodules and parameters that are excluded from this part.
    """

    base: ModuleSource
    lora: LoraConfig
    seed: int = 0
    targets: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    outside: bool = True
    apart: tuple[str, ...] = ()
    frozen: Any = None

    @classmethod
    def of(
        cls, base: ModuleSource, lora: LoraConfig, seed: int, places: tuple[str, ...] = (),
        outside: bool = True, apart: tuple[str, ...] = (), part: str = "",
    ) -> AdaptedSource:  # fmt: skip
        """Add adapters to a source's module; ``part`` names the part in errors. Raise a
        ``ModelError`` if the module has no matching layers."""
        adapted = cls(base, lora, seed, (), places, outside, apart)
        targets = find_targets(base.skeleton(), lora, adapted._is_of, part)
        return replace(adapted, targets=targets)

    def _is_of(self, name: str) -> bool:
        adapted = is_within(name, self.places) != self.outside
        return adapted and not is_within(name, self.apart)

    def new_skeleton(self) -> nn.Module:
        return self._adapted(self.base.new_skeleton())

    def build(self, part: Part | None = None) -> nn.Module:
        return self._adapted(self.base.build(part))

    def _adapted(self, module: nn.Module) -> nn.Module:
        adapt(module, self.targets, self.lora, self.seed, self._is_of)
        if self.frozen:
            set_trained(module, False)
        return set_mode(module)

    def for_names(self, names: Iterable[str]) -> AdaptedSource:
        base = self.base.for_names(filter(is_of_base, names))
        return replace(self, base=base)


@dataclass(frozen=True)
class NewRowsSource(_OverBase):
    """Model of another source that trains only the rows of new tokens, ids [start, stop). The
    weights of ``base`` already have these rows."""

    base: ModuleSource
    start: int
    stop: int
    frozen: Any = None

    def new_skeleton(self) -> nn.Module:
        return self._with_rows(self.base.new_skeleton())

    def build(self, part: Part | None = None) -> nn.Module:
        return self._with_rows(self.base.build(part))

    def _with_rows(self, module: nn.Module) -> nn.Module:
        return set_mode(add_rows(module, range(self.start, self.stop)))

    def for_names(self, names: Iterable[str]) -> NewRowsSource:
        base = self.base.for_names(name for name in names if not is_new_rows(name))
        return replace(self, base=base)
