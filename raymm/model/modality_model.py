"""Models whose modules are :class:`raymm.ModalityModule` objects, which have their weights here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import nn

from raymm.actors.adapters.lora import is_adapter
from raymm.actors.optimizer.optimizer_config import PROJECTOR
from raymm.actors.quota import check_no_shared_parameters
from raymm.actors.weights.source import LiveSource
from raymm.errors import ModelError
from raymm.model.modality_module import ModalityModule
from raymm.model.model import FROZEN, FULL, Model


class ModalityModel(Model):
    """Model with a :class:`raymm.ModalityModule` per module. Parts are the modules, and their
    projectors under the module's name with ``_projector``."""

    @property
    @abstractmethod
    def modalities(self) -> Mapping[str, ModalityModule]:
        """Modules by name."""

    def reloadable(self) -> frozenset[str]:
        return frozenset(
            name for name in self.modalities if not isinstance(self.spec(name).source, LiveSource)
        ) - self.changing

    def mode(self, name: str) -> str:
        modalities = self.modalities
        accepted = [*modalities, *(f"{n}{PROJECTOR}" for n, m in modalities.items() if m.projector)]
        if name not in accepted:
            raise ModelError(
                f"at names {name!r}, which is not a part of the model; accepted: "
                f"{', '.join(accepted)}"
            )
        module = name if name in modalities else name.removesuffix(PROJECTOR)
        projector = None if name == module else modalities[module].projector
        skeleton = projector or self.spec(module).source.skeleton()
        parameters = dict(skeleton.named_parameters())
        adapters = [p for parameter, p in parameters.items() if is_adapter(parameter)]
        flags = {p.requires_grad for p in adapters or parameters.values()}
        if len(flags) > 1:
            raise ModelError(
                f"at names {name!r}, which is partly frozen; accepted: modules that are entirely "
                "frozen or entirely trained"
            )
        return FULL if True in flags else FROZEN

    def set_frozen(self, name: str, frozen: bool) -> None:
        module = name.removesuffix(PROJECTOR)
        self.modalities[module].set_frozen(frozen, name != module)

    def modules_of(self, name: str) -> set[str]:
        return {name.removesuffix(PROJECTOR)}

    def state_prefixes(self, name: str) -> tuple[str, ...]:
        inner = "projector." if name.endswith(PROJECTOR) else "module."
        return (f"{name.removesuffix(PROJECTOR)}/{inner}",)

    def check_unshared(self) -> None:
        modules: dict[str, nn.Module] = {}
        for name, modality in self.modalities.items():
            if modality.module is not None:
                modules[name] = modality.module
            if modality.projector is not None:
                modules[f"{name} projector"] = modality.projector
        try:
            check_no_shared_parameters(modules)
        except ValueError as error:
            raise ModelError(
                f"{error}; give each module a separate copy, or do not tie parameters"
            ) from None
