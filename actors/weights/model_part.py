"""Parts of a Hugging Face VLM: a tower with the code for its features, or all but the towers.

A part has all modules of the model; parameters of other parts are ghosts. The forward of a tower is
the function that the model's forward calls, such as ``get_image_features``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from raymm.actors.modules.blocks import SEARCHED
from raymm.actors.weights.part import Part, keep_parameters
from raymm.actors.weights.source import ModuleSource, set_mode
from raymm.errors import ForwardLeft, InternalError

# Length of the dummy text for a forward that stops at a call.
_TOKENS = 2


@dataclass(frozen=True, order=True)
class Call:
    """Function that a model's forward calls: ``method`` of the submodule ``owner``."""

    owner: str
    method: str

    def of(self, model: nn.Module) -> Callable[..., Any]:
        """Return the bound function."""
        return getattr(model.get_submodule(self.owner), self.method)

    def replace(self, model: nn.Module, by: Callable[..., Any]) -> None:
        """Make the model's forward call another function."""
        setattr(model.get_submodule(self.owner), self.method, by)

    def __str__(self) -> str:
        return ".".join(filter(None, (self.owner, self.method)))


class UpToCall:
    """A model's own forward up to one of its calls, whose result it returns. The text is two dummy
    tokens. Modules outside the part may be ghosts."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        self._model, self._call = model, call

    def __call__(self, **inputs: Any) -> Any:
        """Run the forward with ``inputs``, without text, and return the call's result. Raise an
        ``InternalError`` if the forward does not reach the call."""
        model, call = self._model, self._call
        function, attributes = call.of(model), vars(model.get_submodule(call.owner))
        previous = attributes.get(call.method)

        def reached(*args: Any, **kwargs: Any) -> Any:
            raise ForwardLeft(function(*args, **kwargs), by=self)

        call.replace(model, reached)
        device = next(v.device for v in inputs.values() if isinstance(v, torch.Tensor))
        try:
            text = torch.zeros(1, _TOKENS, dtype=torch.int64, device=device)
            type(model).forward(model, input_ids=text, **inputs, use_cache=False)
        except ForwardLeft as returned:
            if returned.by is not self:  # raised by the end of a stage inside the call
                raise
            return returned.value
        finally:
            if previous is None:
                attributes.pop(call.method)
            else:
                attributes[call.method] = previous
        raise InternalError(f"the forward of {type(model).__name__} does not call {call}")


def is_within(name: str, places: Collection[str]) -> bool:
    """Return True if a name is one of ``places`` or inside one of these submodules."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in places)


def _place_with(child: PreTrainedModel, model: nn.Module) -> None:
    """Give an inner model without parameters the outer model's device and dtype."""
    def first(self: Any) -> torch.Tensor:
        return next(p for p in self.placed_with[0].parameters() if p.is_floating_point())

    base = type(child)
    vars(child)["placed_with"] = (model,)  # in a tuple, so that it is not registered as a submodule
    child.__class__ = type(base.__name__, (base,), {
        "device": property(lambda self: first(self).device),
        "dtype": property(lambda self: first(self).dtype),
        "__module__": base.__module__, "__qualname__": base.__qualname__,
    })  # fmt: skip


@dataclass(frozen=True)
class PartSource(ModuleSource):
    """Some parameters of a model, with its complete structure.

    Attributes:
        places: dotted names of submodules and parameters that make up the part, or, with
            ``outside``, that are excluded from it.
        call: forward of the part; None for the model's own.
        searched: name of the submodule that has the list of blocks.
        frozen_places: submodules and parameters that are not trained.
        trained_places: exceptions within frozen ones.
        whole_forward: run the model's own forward up to the call, not the call itself.
    """

    whole: ModuleSource
    places: tuple[str, ...]
    outside: bool = False
    call: Call | None = None
    searched: str | None = None
    frozen_places: tuple[str, ...] = ()
    trained_places: tuple[str, ...] = ()
    frozen: bool | None = None
    whole_forward: bool = False

    def names(self, model: nn.Module) -> frozenset[str]:
        """Return the names of the part's parameters."""
        return frozenset(
            name for name, _ in model.named_parameters()
            if is_within(name, self.places) != self.outside
        )

    @property
    def generation_config(self) -> GenerationConfig | None:
        return self.whole.origin.generation_config

    def new_skeleton(self) -> nn.Module:
        return self.as_made(self.whole.new_skeleton())

    @property
    def config(self) -> PretrainedConfig | None:
        return self.whole.config

    def as_made(self, model: nn.Module) -> nn.Module:
        model = keep_parameters(model, self.names(model))
        for child in model.modules():
            if isinstance(child, PreTrainedModel) and next(child.parameters(), None) is None:
                _place_with(child, model)
        if self.call is not None:
            self.called(model)
        if self.searched is not None:
            setattr(model, SEARCHED, self.searched)
        for name, parameter in model.named_parameters():
            if self._is_frozen(name):
                parameter.requires_grad_(False)
        set_mode(model)
        for name, module in model.named_modules():
            if self._is_frozen(name):
                module.training = False  # no dropout in a frozen tower with a trained projector
        return model

    def _is_frozen(self, name: str) -> bool:
        if is_within(name, self.trained_places):
            return False
        return bool(self.frozen) or bool(name) and is_within(name, self.frozen_places)

    def called(self, model: nn.Module) -> None:
        """Replace the model's forward by the part's call."""
        assert self.call is not None
        if self.whole_forward:
            vars(model)["forward"] = UpToCall(model, self.call)
        elif self.call != Call("", "forward"):
            vars(model)["forward"] = self.call.of(model)

    def build(self, part: Part | None = None) -> nn.Module:
        names = self.names(self.whole.skeleton())
        part = replace(part or Part(None), among=names)
        return self.as_made(self.whole.build(part))

    def for_names(self, names: Iterable[str]) -> PartSource:
        return replace(self, whole=self.whole.for_names(names))

    def check(self) -> list[str]:
        return self.whole.check()
