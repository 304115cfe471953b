"""A part of a whole model: a tower with what makes features of it, or all but the towers.

A part is the whole model with all its names, in which parameters of other parts are ghosts. That
of a tower is called as the model's forward calls it: its forward is ``get_image_features``, or
whatever else a probe has seen being called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from raymm.actors.modules.blocks import SEARCHED
from raymm.actors.weights.part import Part, keep_parameters
from raymm.actors.weights.source import ModuleSource, set_mode


@dataclass(frozen=True, order=True)
class Call:
    """A function of a model that its forward calls: ``method`` of the submodule ``owner``."""

    owner: str
    method: str

    def of(self, model: nn.Module) -> Callable[..., Any]:
        """The function."""
        return getattr(model.get_submodule(self.owner), self.method)

    def replace(self, model: nn.Module, by: Callable[..., Any]) -> None:
        """Let the model's forward call another one."""
        setattr(model.get_submodule(self.owner), self.method, by)

    def __str__(self) -> str:
        return ".".join(filter(None, (self.owner, self.method)))


def is_within(name: str, places: Collection[str]) -> bool:
    """Whether a parameter is one of these, or in one of these submodules."""
    return any(name == place or name.startswith(place + ".") for place in places)


@dataclass(frozen=True)
class PartSource(ModuleSource):
    """Some parameters of a model, with all of its structure.

    Attributes:
        whole: the model.
        places: dotted names of submodules and parameters. The part is what is in them, or, if
            ``outside``, all else.
        call: what the part's forward is; None: the model's own.
        searched: name of the submodule whose list of blocks the part is cut between.
        frozen_places: of submodules and parameters that are not trained.
    """

    whole: ModuleSource
    places: tuple[str, ...]
    outside: bool = False
    call: Call | None = None
    searched: str | None = None
    frozen_places: tuple[str, ...] = ()
    frozen: bool | None = None

    def names(self, model: nn.Module) -> frozenset[str]:
        """Of the part's parameters."""
        return frozenset(
            name for name, _ in model.named_parameters()
            if is_within(name, self.places) != self.outside
        )

    def skeleton(self) -> nn.Module:
        return self.as_made(self.whole.skeleton())

    @property
    def config(self) -> PretrainedConfig | None:
        return self.whole.config

    def as_made(self, model: nn.Module) -> nn.Module:
        model = keep_parameters(model, self.names(model))
        if self.call is not None:
            self.called(model)
        if self.searched is not None:
            setattr(model, SEARCHED, self.searched)
        for name, parameter in model.named_parameters():
            if self.frozen or is_within(name, self.frozen_places):
                parameter.requires_grad_(False)
        set_mode(model)
        for name, module in model.named_modules():
            if name and is_within(name, self.frozen_places):
                module.training = False  # no dropout in a frozen tower whose projector is trained
        return model

    def called(self, model: nn.Module) -> None:
        """Let the model's forward be what it calls of the part."""
        assert self.call is not None
        if self.call != Call("", "forward"):
            vars(model)["forward"] = self.call.of(model)

    def build(self, part: Part | None = None) -> nn.Module:
        among = self.names(self.whole.skeleton())
        part = replace(part or Part(None), among=among)
        return self.as_made(self.whole.build(part))

    def for_names(self, names: Iterable[str]) -> PartSource:
        return replace(self, whole=self.whole.for_names(names))

    def check(self) -> list[str]:
        return self.whole.check()
