"""Parts of a model that a run freezes or unfreezes while it trains (``run.at``)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from raymm.actors.adapters.lora import is_adapter
from raymm.actors.optimizer.optimizer_config import PROJECTOR
from raymm.errors import ModelError
from raymm.model.multimodal import MultimodalModule
from raymm.model.whole_model import FROZEN, FULL, WholeModel
from raymm.scheduler.graph.module_graph import ModuleGraph


class ChangingParts(Protocol):
    """The parts of a model that can be frozen and unfrozen."""

    def mode(self, name: str) -> str:
        """Return the current mode of a part, ``"full"`` or ``"frozen"``. Raises ModelError if the
        model has no such part, or the part is partly frozen."""
        ...

    def change(self, names: Collection[str]) -> None:
        """Write the weights of these parts to every checkpoint, trained or not."""

    def set_frozen(self, name: str, frozen: bool) -> None:
        """Freeze or unfreeze a part."""

    def prefixes(self, name: str) -> tuple[str, ...]:
        """Return the prefixes of the part's optimizer state names, after ``optimizer/``."""
        ...

    @property
    def graph(self) -> ModuleGraph:
        """Current graph of the model."""
        ...


def changing_parts(model: MultimodalModule | WholeModel) -> ChangingParts:
    """Return the changing parts of a model."""
    return WholeParts(model) if isinstance(model, WholeModel) else ModuleParts(model)


class ModuleParts:
    """Modules by their names in plans, and projectors by the name with ``_projector``."""

    def __init__(self, model: MultimodalModule) -> None:
        self._model = model

    @property
    def graph(self) -> ModuleGraph:
        return self._model.graph

    def mode(self, name: str) -> str:
        model = self._model
        accepted = [*model.module_names]
        accepted += [f"{n}{PROJECTOR}" for n, e in model.encoders.items() if e.projector]
        if name not in accepted:
            raise ModelError(
                f"at names {name!r}, which is not a part of the model; accepted: "
                f"{', '.join(accepted)}"
            )
        parameters = dict(self._skeleton(name).named_parameters())
        adapters = [p for parameter, p in parameters.items() if is_adapter(parameter)]
        flags = {p.requires_grad for p in adapters or parameters.values()}
        if len(flags) > 1:
            raise ModelError(
                f"at names {name!r}, which is partly frozen; accepted: modules that are entirely "
                "frozen or entirely trained"
            )
        return FULL if True in flags else FROZEN

    def change(self, names: Collection[str]) -> None:
        self._model.set_changing(name.removesuffix(PROJECTOR) for name in names)

    def set_frozen(self, name: str, frozen: bool) -> None:
        modality, projector = self._part(name)
        modality.set_frozen(frozen, projector)

    def prefixes(self, name: str) -> tuple[str, ...]:
        inner = "projector." if name.endswith(PROJECTOR) else "module."
        return (f"{name.removesuffix(PROJECTOR)}/{inner}",)

    def _part(self, name: str) -> tuple[Any, bool]:
        projector = name.endswith(PROJECTOR)
        module = name.removesuffix(PROJECTOR)
        return self._model.encoders.get(module, self._model.language_model), projector

    def _skeleton(self, name: str) -> Any:
        modality, projector = self._part(name)
        spec: Any = self._model.spec(name.removesuffix(PROJECTOR))
        return modality.projector if projector else spec.source.skeleton()


class WholeParts:
    """Parts of a :class:`WholeModel` by their names in ``model.train``."""

    def __init__(self, model: WholeModel) -> None:
        self._model = model

    @property
    def graph(self) -> ModuleGraph:
        return self._model.graph

    def mode(self, name: str) -> str:
        if name not in self._model.part_names:
            accepted = ", ".join(self._model.part_names)
            raise ModelError(
                f"at names {name!r}, which is not a part of the model; accepted: {accepted}"
            )
        return FROZEN if self._model.is_frozen(name) else FULL

    def change(self, names: Collection[str]) -> None:
        self._model.set_changing(
            module for name in names for module, _ in self._model.parameters_of(name)
        )

    def set_frozen(self, name: str, frozen: bool) -> None:
        self._model.set_frozen(name, frozen)

    def prefixes(self, name: str) -> tuple[str, ...]:
        return tuple(
            f"{module}/module.{parameter}" for module, parameter in self._model.parameters_of(name)
        )
