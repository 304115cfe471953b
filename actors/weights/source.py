"""Sources of modules; a rank builds only its part.

There are four kinds: a live module, a Hugging Face config, a checkpoint folder
(:mod:`raymm.actors.weights.pretrained_source`), and a factory function for plain modules. Nothing
is unpickled from disk or downloaded: folders are read with safetensors and ``local_files_only``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from raymm.actors.modules.draws import derive_seed
from raymm.actors.weights.parametrized import (
    computed_tensors,
    has_parametrizations,
    initialize_parametrized,
    packed,
    unpacked,
)
from raymm.actors.weights.part import Part
from raymm.actors.weights.stored_weights import header_tensors
from raymm.errors import USER_CODE_RAISES, ModelError
from raymm.packages import import_object

# Tensors with at most this many elements are always allocated.
_SMALL = 4096


class _RealTensors(TorchFunctionMode):
    """Allocates small tensors and those of given shapes on the CPU, the others on the meta device.
    """

    def __init__(self, shapes: Collection[tuple[int, ...]]) -> None:
        super().__init__()
        self._shapes = frozenset(shapes)
        self._constructors = _device_constructors()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in self._constructors and kwargs.get("device") is None:
            shape = _shape(args, kwargs)
            real = shape is None or shape in self._shapes or torch.Size(shape).numel() <= _SMALL
            kwargs = {**kwargs, "device": "cpu" if real else "meta"}
        return function(*args, **kwargs)


def _shape(args: tuple, kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the shape that a tensor constructor is called with; None if it gets values."""
    sizes = kwargs.get("size", args)
    if len(sizes) and isinstance(sizes[0], list | tuple | torch.Size):
        sizes = sizes[0]
    return tuple(sizes) if all(type(size) is int for size in sizes) and len(sizes) else None


def constructed_values(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    shapes: Collection[tuple[int, ...]],
    seed: int,
) -> dict[str, torch.Tensor]:
    """Return constructor values of parameters that are small or have one of the given shapes. Other
    parameters take no memory. The values depend on ``shapes``, but not on the part of the model
    that the caller builds."""
    with torch.random.fork_rng(devices=[]), _RealTensors(shapes):
        torch.default_generator.manual_seed(seed)
        model = model_class._from_config(copy.deepcopy(config), dtype=torch.float32)
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if not parameter.is_meta
    }


class ModuleSource(ABC):
    """Source of a module, complete or in part."""

    frozen: bool | None

    def skeleton(self) -> nn.Module:
        """Return the complete structure, with parameters on the meta device where possible. It is
        built once, and callers must not change it; see :meth:`new_skeleton`."""
        return self._skeleton

    @cached_property
    def _skeleton(self) -> nn.Module:
        return self.new_skeleton()

    @abstractmethod
    def new_skeleton(self) -> nn.Module:
        """Build a :meth:`skeleton` that the caller may change."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the skeleton, which other processes build themselves."""
        return {name: value for name, value in vars(self).items() if name != "_skeleton"}

    @property
    def trains(self) -> bool:
        """True if a parameter is trainable."""
        return any(parameter.requires_grad for parameter in self.skeleton().parameters())

    @abstractmethod
    def build(self, part: Part | None = None) -> nn.Module:
        """Build the module, or ``part`` of it, with real fp32 weights on the CPU."""

    def check(self) -> list[str]:
        """Check the headers of weights on disk against the module, and return notes for the user.
        Raise a ``ModelError`` if weights that :meth:`build` needs are missing."""
        return []

    def for_names(self, names: Iterable[str]) -> ModuleSource:
        """Return this source with the data that a rank needs to own the parameters ``names``."""
        return self

    def as_made(self, model: nn.Module) -> nn.Module:
        """Apply this source's changes to a (small) model of its class, in place."""
        return model

    @property
    def origin(self) -> ModuleSource:
        """The innermost source, without adapters and other additions."""
        return self

    @property
    def generation_config(self) -> GenerationConfig | None:
        """transformers' settings for text generation; None if the model cannot generate."""
        return getattr(self.skeleton(), "generation_config", None)

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
    """Set train mode if anything in the module is trainable, else eval mode."""
    return module.train(any(p.requires_grad for p in module.parameters()))


def on_meta(module: nn.Module) -> nn.Module:
    """Return a deep copy with parameters on the meta device; buffers are copied. Raise a
    ``ModelError`` if an attribute was computed from parameters once."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    try:
        return copy.deepcopy(module, memo | computed_tensors(module))
    except ModelError as error:
        raise ModelError(str(error)) from None


def set_tensor(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a (meta) parameter by a real one of the same shape, keeping ``requires_grad`` and
    ties."""
    owner_name, _, leaf = name.rpartition(".")
    old = module.get_submodule(owner_name)._parameters[leaf]
    assert old is not None
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is old:
                owner._parameters[key] = new


@dataclass(frozen=True)
class LiveSource(ModuleSource):
    """Module that exists in the driver. Ranks are sent the tensors they own."""

    structure: nn.Module
    state: dict[str, torch.Tensor]
    frozen: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if has_parametrizations(self.structure):
            state["structure"] = packed(self.structure)
        return state

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

    def new_skeleton(self) -> nn.Module:
        return copy.deepcopy(self.structure)

    def for_names(self, names: Iterable[str]) -> LiveSource:
        return replace(self, state={name: self.state[name] for name in names})

    def build(self, part: Part | None = None) -> nn.Module:
        module = self.new_skeleton()
        for name in _owned(module, part):
            set_tensor(module, name, self.state[name].clone())
        if part is not None:
            part.prune(module)
        return self._finish(module)


def _owned(module: nn.Module, part: Part | None) -> list[str]:
    if part is None:
        return [name for name, _ in module.named_parameters()]
    return part.owned(module)


@dataclass(frozen=True)
class ConfigSource(ModuleSource):
    """Hugging Face model class and config, initialised from a seed. Each submodule's seed depends
    on its name, so all partitions get the complete model's weights."""

    model_class: type[PreTrainedModel]
    model_config: PretrainedConfig
    seed: int = 0
    frozen: bool | None = None

    def new_skeleton(self) -> PreTrainedModel:
        try:
            with torch.device("meta"):
                model = self.model_class._from_config(
                    copy.deepcopy(self.model_config), dtype=torch.float32
                )
        except USER_CODE_RAISES as error:  # inconsistent sizes may fail anywhere
            reason = next(iter(str(error).splitlines()), "")
            raise ModelError(
                f"a {self.model_class.__name__} cannot be built from these config values: "
                f"{type(error).__name__}: {reason}"
            ) from error
        return cast(PreTrainedModel, self._finish(model))

    @property
    def config(self) -> PretrainedConfig:
        return self.model_config

    def build(self, part: Part | None = None) -> nn.Module:
        model = self.new_skeleton()
        self._initialize(model, _owned(model, part))
        if part is not None:
            part.prune(model)
        return self._finish(model)

    def draw(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return initial values of some parameters, equal to those that :meth:`build` sets. Raise a
        ``ModelError`` if the class does not initialise a parameter."""
        model = self.new_skeleton()
        self._initialize(model, names)
        return {name: model.get_parameter(name).detach() for name in names}

    def _initialize(self, model: PreTrainedModel, names: Sequence[str]) -> None:
        initialize_by_name(model, names, self.seed)
        self._complete(model, names)

    def _complete(self, model: PreTrainedModel, owned: Sequence[str]) -> None:
        """Set parameters that ``_init_weights`` omits to the values of the class's constructor.
        Raise a ``ModelError`` if the constructor sets no values, either."""
        unset = [name for name in owned if torch.isnan(model.get_parameter(name)).any()]
        if not unset:
            return
        values = constructed_values(
            self.model_class, self.model_config, _left_by_init_weights(self.new_skeleton()),
            derive_seed(self.seed, "constructor"),
        )  # fmt: skip
        for name in unset:
            if name not in values or torch.isnan(values[name]).any():
                raise ModelError(
                    f"{type(model).__name__} does not initialise {name!r} from its config; "
                    "pass a live module or a checkpoint folder instead"
                )
            set_tensor(model, name, values[name])


def _left_by_init_weights(skeleton: PreTrainedModel) -> set[tuple[int, ...]]:
    """Return the shapes of parameters that ``_init_weights`` omits, independent of the rank's part.
    """
    versions = {name: p._version for name, p in skeleton.named_parameters()}
    _init_by_name(skeleton, 0)
    return {tuple(p.shape) for n, p in skeleton.named_parameters() if p._version == versions[n]}


def initialize_by_name(model: PreTrainedModel, owned: Sequence[str], seed: int) -> None:
    """Give a meta model real buffers and initialised ``owned`` parameters, in place. Parameters
    that ``_init_weights`` omits become NaN. Submodule names are part of the seed."""
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
            # torch.manual_seed formats a traceback for each missing device type.
            torch.default_generator.manual_seed(derive_seed(seed, name))
            initialize_parametrized(module)
            if all(map(torch.is_floating_point, module.parameters(recurse=False))):
                # Quantised base weights are never initialised.
                _enclosing_model(model, name)._init_weights(module)


def _enclosing_model(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return the innermost PreTrainedModel around a submodule, whose class can initialise it."""
    path = name.split(".") if name else []
    for length in range(len(path), -1, -1):
        candidate = model.get_submodule(".".join(path[:length]))
        if isinstance(candidate, PreTrainedModel):
            return candidate
    return model


@dataclass(frozen=True)
class FactorySource(ModuleSource):
    """Function that returns a plain module, for models that Hugging Face does not have. ``target``
    is ``"package.module:function"``; ``weights`` an optional safetensors state dict."""

    target: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    seed: int = 0
    frozen: bool | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and not Path(self.weights).is_file():
            raise ModelError(f"weights is {self.weights!r}; there is no such file")

    def new_skeleton(self) -> nn.Module:
        return on_meta(self._finish(self._make()))

    def _make(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.seed, self.target))
            module = import_object(self.target)(**self.kwargs)
        if not isinstance(module, nn.Module):
            raise ModelError(f"{self.target} returned {type(module).__name__}, not an nn.Module")
        return module

    def build(self, part: Part | None = None) -> nn.Module:
        module = self._make()
        if self.weights is not None:
            self._load(module, self.weights, load_file)
        if part is not None:
            part.prune(module)
        return self._finish(module)

    def check(self) -> list[str]:
        if self.weights is not None:
            self._load(self.new_skeleton().to("meta"), self.weights, header_tensors)
        return []

    def _load(
        self, module: nn.Module, weights: str, read: Callable[[Path], dict[str, torch.Tensor]]
    ) -> None:
        try:
            module.load_state_dict(read(Path(weights)))
        except (OSError, SafetensorError, ModelError) as error:
            raise ModelError(f"weights is {self.weights!r}; it cannot be read: {error}") from None
        except RuntimeError as error:
            raise ModelError(f"{self.weights} does not fit {self.target}: {error}") from None
