"""Models from folders in transformers' format. Ranks read only their own tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from raymm.actors.modules.brief_error import brief
from raymm.actors.weights.custom_code import custom_code, own_class, why_not_loaded
from raymm.actors.weights.hub_folder import local_folder, pinned
from raymm.actors.weights.model_classes import find_model_class
from raymm.actors.weights.part import Part
from raymm.actors.weights.source import ConfigSource, ModuleSource, derive_seed, set_tensor
from raymm.actors.weights.stored_weights import WeightsReport, folder_report, quiet_loading
from raymm.errors import USER_CODE_RAISES, ModelError

# Quantised formats that transformers can dequantise while loading, on any device.
DEQUANTISED = ("fp8", "mxfp4")
# Value of ``missing_weights`` that initialises missing weights from the seed.
FRESH = "fresh"
# from_pretrained disables the model's own method during construction.
_TIE_WEIGHTS = PreTrainedModel.tie_weights


@dataclass(frozen=True)
class PretrainedSource(ModuleSource):
    """Folder written by ``save_pretrained``. Ranks read only their own tensors.

    Attributes:
        path: folder with ``config.json`` and safetensors weights, or the id of a model on the hub,
            ``ORG/NAME`` or ``ORG/NAME@REVISION``, which becomes ``ORG/NAME@COMMIT`` and is read
            from the cache of each machine.
        model_class: a transformers class name; by default the one in the config.
        language_model: resolve the default through ``AutoModelForCausalLM``'s mapping.
        trust_remote_code: run Python files of the folder (``auto_map``) here and on every rank.
            Otherwise folders that need them are rejected.
        missing_weights: ``"fresh"`` initialises weights that the folder lacks, or has in other
            shapes, from ``seed``; otherwise such a folder is rejected.
    """

    path: str
    model_class: str | None = None
    language_model: bool = False
    frozen: bool | None = None
    trust_remote_code: bool = False
    missing_weights: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.missing_weights not in (None, FRESH):
            raise ModelError(
                f"missing_weights is {self.missing_weights!r}; accepted: {FRESH!r}, None"
            )
        object.__setattr__(self, "path", pinned(self.path))
        folder = Path(self.folder)
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"path is {self.path!r}; expected a folder with config.json and safetensors"
            )
        if not any(folder.glob("*.safetensors")):
            raise ModelError(f"path is {self.path!r}; the folder has no *.safetensors file")
        method = self._quantised()
        if method is not None and method not in DEQUANTISED:
            raise ModelError(
                f"path is {self.path!r}, whose weights are quantised with {method!r}; accepted: "
                f"folders in float32, bfloat16 or float16, or quantised as "
                f"{' or '.join(DEQUANTISED)}. Load it with transformers, call dequantize() and "
                "save_pretrained(), or take the folder it was quantised from (adapters with base "
                "int8 or int4 quantise it while training)"
            )

    def _quantised(self) -> str | None:
        """Return the quantisation method that config.json names, or None."""
        try:
            config = json.loads((Path(self.folder) / "config.json").read_bytes())
        except ValueError:
            return None  # transformers reports the error
        if not isinstance(config, dict):
            return None
        section = config.get("quantization_config") or config.get("compression_config")
        if not isinstance(section, dict):
            return None
        return str(section.get("quant_method", "compressed-tensors"))

    def __getstate__(self) -> dict[str, Any]:
        """Drop cached values: every rank imports classes of the folder's code itself."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def folder(self) -> str:
        """The folder on this machine; missing files of a hub model are downloaded."""
        return local_folder(self.path)

    @cached_property
    def _auto_config(self) -> PretrainedConfig:
        try:
            return transformers.AutoConfig.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=self.trust_remote_code
            )
        except USER_CODE_RAISES as error:  # files and code of a folder may raise anything
            reason = f"{self.path!r}; {type(error).__name__}: {error}"
            if not self.trust_remote_code:
                reason = why_not_loaded(self.folder, "AutoConfig", error)
            raise ModelError(f"path is {reason}") from error

    @cached_property
    def resolved_class(self) -> type[PreTrainedModel]:
        config, name = self._auto_config, self.model_class
        architecture = (config.architectures or [None])[0]
        custom_class = self._own_class(name, architecture)
        if custom_class is not None and self.trust_remote_code:
            return own_class(self.folder, custom_class)
        if name is None and self.language_model and not custom_class:
            mapping = transformers.AutoModelForCausalLM._model_mapping
            if type(config) in mapping:
                return cast(type[PreTrainedModel], mapping[type(config)])
        if name is None:
            name = architecture
        if name is None:
            raise ModelError(f"{self.path}: config.json names no architecture; give model_class")
        try:
            return find_model_class(name, config)
        except ModelError as error:
            if custom_class is not None:
                reason = why_not_loaded(self.folder, self._auto_class, error)
                raise ModelError(f"path is {reason}") from None
            raise

    @property
    def _auto_class(self) -> str:
        return "AutoModelForCausalLM" if self.language_model else "AutoModel"

    def _own_class(self, class_name: str | None, architecture: str | None) -> str | None:
        """Return the custom class to use, by name, architecture or auto class; None for a
        transformers class."""
        classes = custom_code(self.folder)
        by_name = {target.rpartition(".")[2]: target for target in classes.values()}
        if class_name is not None:
            return by_name.get(class_name)
        native = architecture is None or hasattr(transformers, architecture)
        if native and not self.trust_remote_code:
            return None
        return by_name.get(architecture or "") or classes.get(self._auto_class)

    @cached_property
    def _config(self) -> PretrainedConfig:
        config_class = self.resolved_class.config_class
        if config_class is None or isinstance(self._auto_config, config_class):
            return self._auto_config
        return config_class.from_pretrained(self.folder, local_files_only=True)

    @property
    def config(self) -> PretrainedConfig:
        return self._config

    @property
    def generation_config(self) -> GenerationConfig | None:
        if not (Path(self.folder) / "generation_config.json").is_file():
            return super().generation_config
        try:
            return GenerationConfig.from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(f"path is {self.path!r}; generation_config.json: {error}") from error

    def new_skeleton(self) -> nn.Module:
        return ConfigSource(self.resolved_class, self._config, frozen=self.frozen).new_skeleton()

    def build(self, part: Part | None = None) -> nn.Module:
        model_class = self.resolved_class
        if part is not None:
            # A subclass of the same name that prunes in __init__: from_pretrained then builds the
            # rest on meta and reads only the remaining tensors.
            base = model_class

            def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
                base.__init__(self, config, *args, **kwargs)
                # before pruning, because ties decide which stage owns a parameter
                _TIE_WEIGHTS(self)
                part.prune(self)
                held = {name for name, _ in self.named_parameters(remove_duplicate=False)}
                self.all_tied_weights_keys = {
                    target: origin
                    for target, origin in self.all_tied_weights_keys.items()
                    if target in held and origin in held
                }

            model_class = type(base.__name__, (base,), {"__init__": __init__})
            model_class.__module__ = base.__module__
        options: dict[str, Any] = {}
        if (method := self._quantised()) is not None:
            kind = AUTO_QUANTIZATION_CONFIG_MAPPING[method]
            options["quantization_config"] = kind(dequantize=True)
        try:
            # transformers initialises weights that the class declares unimportant, hence the seed.
            with quiet_loading(), torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(derive_seed(self.seed, self.path))
                loaded: Any = model_class.from_pretrained(
                    self.folder, local_files_only=True, use_safetensors=True, dtype=torch.float32,
                    trust_remote_code=self.trust_remote_code, ignore_mismatched_sizes=True,
                    output_loading_info=True, **options,
                )
        except (RuntimeError, SafetensorError) as error:
            raise ModelError(f"path is {self.path!r}; {brief(error)}") from error
        model, info = loaded
        report = WeightsReport.of(info)
        self._refuse(report)
        self._draw(model, report)
        if part is not None:
            _restore_ghosts(model)
        return self._finish(model)

    def check(self) -> list[str]:
        try:
            report = folder_report(Path(self.folder), self.resolved_class, self._config)
        except ModelError as error:
            raise ModelError(f"path is {self.path!r}; {error}") from error
        self._refuse(report)
        return [f"{self.path}: {note}" for note in report.notes(self.resolved_class)]

    def _refuse(self, report: WeightsReport) -> None:
        reason = None if self.missing_weights == FRESH else report.refusal(self.resolved_class)
        if reason is not None:
            raise ModelError(f"path is {self.path!r}; {reason}")

    def _draw(self, model: PreTrainedModel, report: WeightsReport) -> None:
        """Initialise missing parameters as any stage and replica would; buffers keep the class's
        values."""
        parameters = dict(model.named_parameters())
        if names := [name for name in report.fresh if name in parameters]:
            source = ConfigSource(self.resolved_class, self._config, self.seed)
            for name, value in source.draw(names).items():
                set_tensor(model, name, value)


def _restore_ghosts(model: nn.Module) -> None:
    """Move ghosts from the meta device, on which from_pretrained builds models, to the CPU."""
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                ghost = torch.zeros((), dtype=value.dtype).expand(value.shape)
                module.__dict__[name] = ghost
