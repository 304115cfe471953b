"""Source whose module trains only the embedding and head rows of new tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from raymm.actors.adapters.new_rows import add_rows, is_new_rows
from raymm.actors.weights.part import Part
from raymm.actors.weights.source import ModuleSource, set_mode


@dataclass(frozen=True)
class NewRowsSource(ModuleSource):
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

    def check(self) -> list[str]:
        return self.base.check()

    def for_names(self, names: Iterable[str]) -> NewRowsSource:
        base = self.base.for_names(name for name in names if not is_new_rows(name))
        return replace(self, base=base)

    @property
    def origin(self) -> ModuleSource:
        return self.base.origin

    @property
    def config(self) -> PretrainedConfig | None:
        return self.base.config
