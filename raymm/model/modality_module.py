"""A module of a multimodal model: an encoder with its projector, or the language model.

The description records the source of the weights and the widths; nothing is loaded for it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from raymm.actors.adapters.lora import adapt, is_adapter, set_trained
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.adapters.targets import find_targets
from raymm.actors.modules.draws import derive_seed
from raymm.actors.modules.projector import KINDS, Projector, ProjectorConfig
from raymm.actors.optimizer.optimizer_config import PROJECTOR
from raymm.actors.quota import check_no_shared_parameters
from raymm.actors.weights.adapted_source import AdaptedSource
from raymm.actors.weights.model_classes import find_model_class
from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.actors.weights.source import ConfigSource, LiveSource, ModuleSource, set_mode
from raymm.errors import ModelError
from raymm.model.model import FROZEN, FULL, Model

_LOGGER = logging.getLogger(__name__)


class ModalityModule(nn.Module):
    """An encoder with its projector, or the language model.

    Args:
        module: a live ``nn.Module``; a Hugging Face config (random weights from ``seed``); the path
            of a local checkpoint folder (only the ranks that need the weights read them, never the
            driver); or a :class:`raymm.actors.weights.source.ModuleSource` such as
            ``FactorySource``.
        projector: ``"linear"``, ``"mlp"``, a live ``nn.Module``, or None if the encoder's output is
            as wide as the language model.
        frozen: True or False sets ``requires_grad`` of the whole module. None leaves a live module
            unchanged and makes any other trainable. A module without trainable parameters runs in
            eval mode.
        projector_frozen: the same for the projector.
        lora: adapters of the module's linear layers, added in place to a live module. All other
            weights stay frozen.
        projector_lora: the same for the projector.
        hidden_size: width of the encoder's output, where the config does not have it.
        model_class: transformers class name, or its path within transformers, where config or
            folder do not have it.
        preprocess_callback: ``f(inputs) -> inputs`` before the encoder.
        postprocess_module_callback: ``f(inputs, output) -> output`` after the encoder.
        postprocess_projector_callback: ``f(inputs, output) -> output`` after the projector.
        example_inputs: inputs of the encoder in a batch, before its preprocess callback, for the
            probe of cuts; guessed from the config by default.
        seed: seed of random weights.
        trust_remote_code: True to run Python files of the checkpoint folder, here and on every
            rank. Otherwise a folder whose classes transformers does not know is refused.
        missing_weights: ``"fresh"`` draws weights that the checkpoint folder lacks, or has in other
            shapes, from ``seed``, as for the head of a new task. Otherwise the folder is refused.

    Raises:
        ModelError: names the argument and what is accepted.
    """

    def __init__(
        self,
        module: nn.Module | PretrainedConfig | ModuleSource | str | os.PathLike[str],
        projector: str | nn.Module | None = None,
        *,
        frozen: bool | None = None,
        projector_frozen: bool | None = None,
        lora: LoraConfig | None = None,
        projector_lora: LoraConfig | None = None,
        hidden_size: int | None = None,
        model_class: str | type[PreTrainedModel] | None = None,
        preprocess_callback: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        postprocess_module_callback: Callable[[dict[str, Any], Any], Any] | None = None,
        postprocess_projector_callback: Callable[[dict[str, Any], Any], Any] | None = None,
        example_inputs: dict[str, torch.Tensor] | None = None,
        seed: int = 0,
        trust_remote_code: bool = False,
        missing_weights: str | None = None,
    ) -> None:
        super().__init__()
        if missing_weights is not None and not isinstance(module, str | os.PathLike):
            raise ModelError(
                f"missing_weights is {missing_weights!r}, but module is a {type(module).__name__}; "
                "accepted only with the path of a checkpoint folder"
            )
        if isinstance(projector, str) and projector not in KINDS:
            raise ModelError(
                f"projector is {projector!r}; accepted: {', '.join(KINDS)}, an nn.Module, None"
            )
        self._check_modes(frozen, lora, projector_frozen, projector_lora, projector)
        self.module: nn.Module | None = None
        self.projector: nn.Module | None = None
        self._description = None if isinstance(module, nn.Module) else module
        self._model_class = model_class
        self._frozen = frozen
        self._projector_frozen = projector_frozen
        self.lora, self.projector_lora = lora, projector_lora
        self._projector_kind = projector if isinstance(projector, str) else None
        self._causal = False
        # By kind and frozen flag, since a source keeps what it has read and built.
        self._sources: dict[tuple[bool, bool | None], ModuleSource] = {}
        self._seed = seed
        self._hidden_size = hidden_size
        self._trust_remote_code = trust_remote_code
        self._missing_weights = missing_weights
        self.preprocess_callback = preprocess_callback
        self.postprocess_module_callback = postprocess_module_callback
        self.postprocess_projector_callback = postprocess_projector_callback
        self.example_inputs = example_inputs
        if isinstance(module, nn.Module):
            self.module = module
            if frozen is not None:
                module.requires_grad_(not frozen)
            _adapted(module, lora, seed)
            set_mode(module)
        if isinstance(projector, nn.Module):
            self.projector = projector
            if projector_frozen is not None:
                projector.requires_grad_(not projector_frozen)
            _adapted(projector, projector_lora, seed)

    @staticmethod
    def _check_modes(
        frozen: bool | None, lora: LoraConfig | None, projector_frozen: bool | None,
        projector_lora: LoraConfig | None, projector: Any,
    ) -> None:
        for name, flag, adapters in (
            ("frozen", frozen, lora), ("projector_frozen", projector_frozen, projector_lora)
        ):
            if adapters is not None and flag is not None:
                raise ModelError(
                    f"{name} is {flag!r}, but adapters are given, which freeze all other weights; "
                    "leave it out"
                )
        if projector is None and projector_lora is not None:
            raise ModelError("projector_lora is given, but projector is None; leave it out")

    def set_causal(self) -> None:
        """Use the module as a language model, which determines its class if its source does not."""
        self._causal = True

    def source(self) -> ModuleSource:
        """Return the source that ranks build this module from."""
        if self.module is not None:
            return LiveSource.of(self.module)
        key = self._causal, self._frozen
        if key not in self._sources:
            source = self._described()
            if self.lora is not None:
                adapted = AdaptedSource.of(source, self.lora, self._seed)
                source = dataclasses.replace(adapted, frozen=self._frozen)
            self._sources[key] = source
        return self._sources[key]

    def _described(self) -> ModuleSource:
        """Return the source of the weights without adapters."""
        description, frozen = self._description, self._frozen
        if isinstance(description, ModuleSource):
            return description if frozen is None else _with_frozen(description, frozen)
        if isinstance(description, PretrainedConfig):
            model_class = self._class_for(description)
            return ConfigSource(model_class, description, seed=self._seed, frozen=frozen)
        if isinstance(description, str | os.PathLike):
            name = self._model_class
            name = name.__name__ if isinstance(name, type) else name
            return PretrainedSource(
                os.fspath(description), name, self._causal, frozen,
                self._trust_remote_code, self._missing_weights, self._seed,
            )
        raise ModelError(
            f"module is a {type(description).__name__}; accepted: an nn.Module, a Hugging Face "
            "config, the path of a checkpoint folder, a ModuleSource"
        )

    def _class_for(self, config: PretrainedConfig) -> type[PreTrainedModel]:
        if isinstance(self._model_class, type):
            return self._model_class
        if isinstance(self._model_class, str):
            return find_model_class(self._model_class, config)
        auto = transformers.AutoModelForCausalLM if self._causal else transformers.AutoModel
        if type(config) not in auto._model_mapping:
            raise ModelError(
                f"{auto.__name__} knows no model for {type(config).__name__}; give model_class"
            )
        return cast(type[PreTrainedModel], auto._model_mapping[type(config)])

    @property
    def folder(self) -> str | None:
        """Checkpoint folder of the module; None if it has another source."""
        described = self._description
        return os.fspath(described) if isinstance(described, str | os.PathLike) else None

    def output_size(self, source: ModuleSource) -> int:
        """Return the width of the module's output features. Raises ModelError if the width is
        unknown, or ``hidden_size`` contradicts the module."""
        hidden_size, config = self._hidden_size, source.config
        stated = [
            value
            for container in (config, self.module)
            for name in ("hidden_size", "d_model", "n_embd")
            if isinstance(value := getattr(container, name, None), int)
        ]
        if hidden_size is None and not stated:
            raise ModelError("the width of the module's output is unknown; give hidden_size")
        if hidden_size is None:
            return stated[0]
        if stated and self.postprocess_module_callback is None:
            # Some models add a last layer of another width, which their config has as well.
            accepted = config.to_dict().values() if isinstance(config, PretrainedConfig) else stated
            if hidden_size not in accepted:
                raise ModelError(
                    f"hidden_size is {hidden_size}, but the module gives features of width "
                    f"{stated[0]} and no postprocess_module_callback changes them"
                )
        return hidden_size

    def build_projector(self, name: str, in_features: int, out_features: int) -> None:
        """Build the projector if it was given by kind, and check its widths. Its random weights
        depend on the encoder's name. Raises ModelError if the widths do not match."""
        if self._projector_kind is not None and self.projector is None:
            config = ProjectorConfig(self._projector_kind, in_features, out_features)
            source = ConfigSource(
                Projector, config, derive_seed(self._seed, name), self._projector_frozen
            )
            self.projector = _adapted(source.build(), self.projector_lora, self._seed)
        if self.projector is None:
            if in_features != out_features:
                raise ModelError(
                    f"encoder {name!r} gives features of width {in_features}, the language model "
                    f"takes {out_features}; give a projector: {', '.join(KINDS)}, or an nn.Module"
                )
            return
        _check_projector(name, self.projector, in_features, out_features)

    def freeze(self, module: bool = True, projector: bool = False) -> ModalityModule:
        """Freeze or unfreeze the module and the projector. Raises ModelError if one of them has
        adapters."""
        if self.lora is not None or self.projector_lora is not None:
            raise ModelError("freeze is not supported for a module with adapters (lora)")
        self.set_frozen(module, False)
        self.set_frozen(projector, True)
        return self

    def give_example(self, item: Mapping[str, torch.Tensor]) -> None:
        """Use an item of the data as ``example_inputs`` if there are none, with floats in fp32."""
        if self.example_inputs is None:
            self.example_inputs = {
                key: value.float() if value.is_floating_point() else value
                for key, value in item.items()
            }

    def set_frozen(self, frozen: bool, projector: bool) -> None:
        """Freeze or unfreeze the module, or its projector; with adapters, only the adapters
        change."""
        if projector:
            self._projector_frozen, module = frozen, self.projector
        else:
            self._frozen, module = frozen, self.module
        if module is not None:
            set_trained(module, not frozen)
            set_mode(module)

    def materialize(self) -> nn.Module:
        """Return the whole module with weights in this process."""
        if self.module is None:
            self.module = self.source().build()
        return self.module


def _adapted(module: nn.Module, lora: LoraConfig | None, seed: int) -> nn.Module:
    """Return a live module, with adapters if ``lora`` is given."""
    return module if lora is None else adapt(module, find_targets(module, lora), lora, seed)


def _with_frozen(source: ModuleSource, frozen: bool) -> ModuleSource:
    return dataclasses.replace(cast(Any, source), frozen=frozen)


def check_weights(module: str, source: ModuleSource) -> None:
    """Compare the weights on disk with the module, and log unused or random weights. Raises
    ModelError if the weights do not fit the module."""
    for note in source.check():
        _LOGGER.warning("note: %s: %s", module, note)


def _check_projector(name: str, projector: nn.Module, in_features: int, out_features: int) -> None:
    """Check that the first and last linear layer, if there are any, have the given widths."""
    linears = [m for m in projector.modules() if isinstance(m, nn.Linear)]
    if not linears:
        return
    if linears[0].in_features != in_features:
        raise ModelError(
            f"projector of encoder {name!r} takes width {linears[0].in_features}, but the "
            f"encoder gives {in_features}; set hidden_size if a callback changes the width"
        )
    if linears[-1].out_features != out_features:
        raise ModelError(
            f"projector of encoder {name!r} gives width {linears[-1].out_features}, but the "
            f"language model takes {out_features}"
        )


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
