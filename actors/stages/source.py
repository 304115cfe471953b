"""Where a module comes from, and how a rank builds only its part of it.

Four sources, one interface: a live module, a Hugging Face config, a local checkpoint
folder, and a factory function for plain modules. Nothing is unpickled from disk and
nothing is fetched: folders are read with safetensors and ``local_files_only``.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from raymm.actors.stages.constructed_values import constructed_values
from raymm.actors.stages.custom_code import custom_code, own_class, why_not_loaded
from raymm.actors.stages.cut import CutInfo, prune, stage_parameters
from raymm.actors.stages.model_classes import ModelClassError, find_model_class
from raymm.actors.stages.parametrized import (
    ComputedTensorError,
    computed_tensors,
    has_parametrizations,
    initialize_parametrized,
    packed,
    unpacked,
)


class SourceError(ValueError):
    """A module that cannot be built. Names the field, its value and what is accepted."""


@dataclass(frozen=True)
class Part:
    """Blocks [lo, hi) of a module; what ``info`` says surrounds them comes along."""

    info: CutInfo
    lo: int
    hi: int


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from anything with a stable ``str``."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def import_object(target: str) -> Any:
    """The object that ``"package.module:name"`` names.

    Raises:
        SourceError: if the path is malformed or there is no such module or name.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise SourceError(f"import path is {target!r}; expected 'package.module:name'")
    try:
        return getattr(importlib.import_module(module_name), name)
    except Exception as error:  # the module is a program: it may raise anything
        reason = str(error)
        if not isinstance(error, ImportError | AttributeError):
            reason = f"{type(error).__name__}: {error}"
        raise SourceError(f"import path {target!r} does not lead anywhere: {reason}") from error


class ModuleSource(ABC):
    """How to get a module, whole or in part."""

    frozen: bool | None

    @abstractmethod
    def skeleton(self) -> nn.Module:
        """The whole structure, with parameters on the meta device where possible."""

    @abstractmethod
    def build(self, part: Part | None = None) -> nn.Module:
        """The module with real weights on the CPU in fp32; only ``part`` of it, if given."""

    def for_names(self, names: Iterable[str]) -> ModuleSource:
        """This source with whatever a rank that owns ``names`` needs to travel with it."""
        return self

    @property
    def config(self) -> PretrainedConfig | None:
        """The Hugging Face config, if there is one."""
        return getattr(self.skeleton(), "config", None)

    def _finish(self, module: nn.Module) -> nn.Module:
        """Apply the frozen flag; a module with nothing trainable runs in eval mode."""
        if self.frozen is not None:
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.requires_grad_(not self.frozen)
        return set_mode(module)


def set_mode(module: nn.Module) -> nn.Module:
    """Train mode if anything in the module is trainable, else eval mode."""
    return module.train(any(p.requires_grad for p in module.parameters()))


def on_meta(module: nn.Module) -> nn.Module:
    """A deep copy whose parameters are on the meta device; buffers are copied.

    Raises:
        SourceError: an attribute that was computed from parameters once.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    try:
        return copy.deepcopy(module, memo | computed_tensors(module))
    except ComputedTensorError as error:
        raise SourceError(str(error)) from None


def set_tensor(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a (meta) parameter by a real one, keeping ``requires_grad`` and ties."""
    owner_name, _, leaf = name.rpartition(".")
    old = module.get_submodule(owner_name)._parameters[leaf]
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is old:
                owner._parameters[key] = new


@dataclass(frozen=True)
class LiveSource(ModuleSource):
    """A module that exists in the driver. Ranks are sent the tensors they own."""

    structure: nn.Module
    state: dict[str, torch.Tensor]
    frozen: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        if not has_parametrizations(self.structure):
            return dict(vars(self))
        return {**vars(self), "structure": packed(self.structure)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        structure = state["structure"]
        if isinstance(structure, bytes):
            structure = unpacked(structure)
        vars(self).update(state, structure=structure)

    @classmethod
    def of(cls, module: nn.Module) -> LiveSource:
        return cls(on_meta(module), {n: p.detach() for n, p in module.named_parameters()})

    def skeleton(self) -> nn.Module:
        return self.structure

    def for_names(self, names: Iterable[str]) -> LiveSource:
        return replace(self, state={name: self.state[name] for name in names})

    def build(self, part: Part | None = None) -> nn.Module:
        module = copy.deepcopy(self.structure)
        for name in _owned(module, part):
            set_tensor(module, name, self.state[name].clone())
        if part is not None:
            prune(module, part.info, part.lo, part.hi)
        return self._finish(module)


def _owned(module: nn.Module, part: Part | None) -> list[str]:
    if part is None:
        return [name for name, _ in module.named_parameters()]
    return stage_parameters(module, part.info, part.lo, part.hi)


@dataclass(frozen=True)
class ConfigSource(ModuleSource):
    """A Hugging Face model class and config, initialised from a seed.

    Every submodule draws from its own seed, derived from its name, so that any partition
    gets the same weights as the whole.
    """

    model_class: type[PreTrainedModel]
    model_config: PretrainedConfig
    seed: int = 0
    frozen: bool | None = None

    def skeleton(self) -> nn.Module:
        try:
            with torch.device("meta"):
                model = self.model_class._from_config(
                    copy.deepcopy(self.model_config), dtype=torch.float32
                )
        except Exception as error:  # sizes that do not fit may fail anywhere in it
            reason = next(iter(str(error).splitlines()), "")
            raise SourceError(
                f"a {self.model_class.__name__} cannot be made of these config values: "
                f"{type(error).__name__}: {reason}"
            ) from error
        return self._finish(model)

    @property
    def config(self) -> PretrainedConfig:
        return self.model_config

    def build(self, part: Part | None = None) -> nn.Module:
        model = self.skeleton()
        owned = _owned(model, part)
        initialize_by_name(model, owned, self.seed)
        self._complete(model, owned)
        if part is not None:
            prune(model, part.info, part.lo, part.hi)
        return self._finish(model)


    def _complete(self, model: PreTrainedModel, owned: list[str]) -> None:
        """Values for what ``_init_weights`` leaves as it is, from the class's constructor.

        Raises:
            SourceError: if that leaves a parameter without values, too.
        """
        left = [name for name in owned if torch.isnan(model.get_parameter(name)).any()]
        if not left:
            return
        values = constructed_values(
            self.model_class, self.model_config, _left_by_init_weights(self.skeleton()),
            derive_seed(self.seed, "constructor"),
        )  # fmt: skip
        for name in left:
            if name not in values or torch.isnan(values[name]).any():
                raise SourceError(
                    f"{type(model).__name__} does not initialise {name!r} from its config; "
                    "pass a live module or a checkpoint folder instead"
                )
            set_tensor(model, name, values[name])


def _left_by_init_weights(skeleton: PreTrainedModel) -> set[tuple[int, ...]]:
    """Shapes of the parameters of a meta model that ``_init_weights`` does not write to. The same
    on every rank, whatever it owns: what a constructor draws depends on what it makes."""
    before = {name: p._version for name, p in skeleton.named_parameters()}
    _init_by_name(skeleton, 0)
    return {tuple(p.shape) for n, p in skeleton.named_parameters() if p._version == before[n]}


def initialize_by_name(model: PreTrainedModel, owned: list[str], seed: int) -> None:
    """Give a meta model real buffers and real, freshly initialised ``owned`` parameters. What its
    class's ``_init_weights`` leaves as it is becomes NaN."""
    for name in owned:
        meta = model.get_parameter(name)
        set_tensor(model, name, torch.full(meta.shape, float("nan"), dtype=meta.dtype))
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.zeros_like(buffer, device="cpu")
    _init_by_name(model, seed)


def _init_by_name(model: PreTrainedModel, seed: int) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, module in reversed(list(model.named_modules())):
            torch.manual_seed(derive_seed(seed, name))
            initialize_parametrized(module)
            _enclosing_model(model, name)._init_weights(module)


def _enclosing_model(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The innermost PreTrainedModel around a submodule: its class knows how to init it."""
    path = name.split(".") if name else []
    for length in range(len(path), -1, -1):
        candidate = model.get_submodule(".".join(path[:length]))
        if isinstance(candidate, PreTrainedModel):
            return candidate
    return model


@dataclass(frozen=True)
class PretrainedSource(ModuleSource):
    """A local folder that ``save_pretrained`` wrote. Ranks read only their own tensors.

    Attributes:
        path: the folder; it must hold ``config.json`` and safetensors weights.
        model_class: a transformers class name; by default the one in the config.
        language_model: resolve the default through ``AutoModelForCausalLM``'s mapping.
        trust_remote_code: run Python files that the folder brings (``auto_map``), here and on
            every rank. Otherwise nothing of them runs, and what transformers cannot load without
            them is refused.
    """

    path: str
    model_class: str | None = None
    language_model: bool = False
    frozen: bool | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        folder = Path(self.path)
        if not (folder / "config.json").is_file():
            raise SourceError(
                f"path is {self.path!r}; expected a folder with config.json and safetensors"
            )
        if not any(folder.glob("*.safetensors")):
            raise SourceError(f"path is {self.path!r}; the folder has no *.safetensors file")

    def __getstate__(self) -> dict[str, Any]:
        """Without what is cached: classes of the folder's own code are imported by every rank."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def _auto_config(self) -> PretrainedConfig:
        try:
            return transformers.AutoConfig.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=self.trust_remote_code
            )
        except Exception as error:  # a folder may hold anything, and so may its code
            why = f"{self.path!r}; {type(error).__name__}: {error}"
            if not self.trust_remote_code:
                why = why_not_loaded(self.path, "AutoConfig", error)
            raise SourceError(f"path is {why}") from error

    @cached_property
    def resolved_class(self) -> type[PreTrainedModel]:
        config, name = self._auto_config, self.model_class
        architecture = (config.architectures or [None])[0]
        own = self._own_class(name, architecture)
        if own is not None and self.trust_remote_code:
            return own_class(self.path, own)
        if name is None and self.language_model and not own:
            mapping = transformers.AutoModelForCausalLM._model_mapping
            if type(config) in mapping:
                return mapping[type(config)]
        if name is None:
            name = architecture
        if name is None:
            raise SourceError(f"{self.path}: config.json names no architecture; give model_class")
        try:
            return find_model_class(name, config)
        except ModelClassError as error:
            if own is not None:
                why = why_not_loaded(self.path, self._auto_class, error)
                raise SourceError(f"path is {why}") from None
            raise

    @property
    def _auto_class(self) -> str:
        return "AutoModelForCausalLM" if self.language_model else "AutoModel"

    def _own_class(self, wanted: str | None, architecture: str | None) -> str | None:
        """The class of the folder's own code that would be used: the one asked for, else its
        architecture, else the one for what the module is; None if transformers has it."""
        found = custom_code(self.path)
        by_name = {target.rpartition(".")[2]: target for target in found.values()}
        if wanted is not None:
            return by_name.get(wanted)
        native = architecture is None or hasattr(transformers, architecture)
        if native and not self.trust_remote_code:
            return None
        return by_name.get(architecture or "") or found.get(self._auto_class)

    @cached_property
    def _config(self) -> PretrainedConfig:
        config_class = self.resolved_class.config_class
        if config_class is None or isinstance(self._auto_config, config_class):
            return self._auto_config
        return config_class.from_pretrained(self.path, local_files_only=True)

    @property
    def config(self) -> PretrainedConfig:
        return self._config

    def skeleton(self) -> nn.Module:
        return ConfigSource(self.resolved_class, self._config, frozen=self.frozen).skeleton()

    def build(self, part: Part | None = None) -> nn.Module:
        model_class = self.resolved_class
        if part is not None:
            # Same name, pruned in __init__: from_pretrained then builds the rest on meta
            # and reads only the tensors that are left.
            base = model_class

            def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
                base.__init__(self, config, *args, **kwargs)
                self.tie_weights()  # now, not after loading: ties decide who owns what
                prune(self, part.info, part.lo, part.hi)
                held = {name for name, _ in self.named_parameters(remove_duplicate=False)}
                self.all_tied_weights_keys = {
                    target: origin
                    for target, origin in self.all_tied_weights_keys.items()
                    if target in held and origin in held
                }

            model_class = type(base.__name__, (base,), {"__init__": __init__})
            model_class.__module__ = base.__module__
        level = hf_logging.get_verbosity()
        hf_logging.set_verbosity_error()  # pruned weights would be reported as unexpected
        try:
            model = model_class.from_pretrained(
                self.path, local_files_only=True, use_safetensors=True, dtype=torch.float32,
                trust_remote_code=self.trust_remote_code,
            )
        finally:
            hf_logging.set_verbosity(level)
        if part is not None:
            _restore_ghosts(model)
        return self._finish(model)


def _restore_ghosts(model: nn.Module) -> None:
    """Ghosts were made on the meta device that from_pretrained builds on; bring them home."""
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                ghost = torch.zeros((), dtype=value.dtype).expand(value.shape)
                module.__dict__[name] = ghost


@dataclass(frozen=True)
class FactorySource(ModuleSource):
    """A function that returns a plain module, for models Hugging Face does not have.

    Attributes:
        target: ``"package.module:function"``.
        kwargs: arguments of the function.
        weights: optional safetensors file with the module's state dict.
        seed: seed of the initial weights.
    """

    target: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    seed: int = 0
    frozen: bool | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and not Path(self.weights).is_file():
            raise SourceError(f"weights is {self.weights!r}; there is no such file")

    def skeleton(self) -> nn.Module:
        return on_meta(self._finish(self._make()))

    def _make(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.seed, self.target))
            module = import_object(self.target)(**self.kwargs)
        if not isinstance(module, nn.Module):
            raise SourceError(f"{self.target} returned {type(module).__name__}, not an nn.Module")
        return module

    def build(self, part: Part | None = None) -> nn.Module:
        module = self._make()
        if self.weights is not None:
            try:
                module.load_state_dict(load_file(self.weights))
            except RuntimeError as error:
                raise SourceError(f"{self.weights} does not fit {self.target}: {error}") from None
        if part is not None:
            prune(module, part.info, part.lo, part.hi)
        return self._finish(module)
