"""Small copies of a model for trials.

Nothing here knows a model by name. A copy has few layers with all kinds among them, a narrow
feed-forward and a small vocabulary. If layers cannot be selected (the config fixes groups, or kinds
follow from layer numbers), a copy has all layers up to the last new kind, or all layers. Models
that do not run this way (a feed-forward of fixed width, layers that a config lists by number) are
tried at their own size, unless they are too large.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from raymm.actors.experts.routing import SWITCH, switched_on
from raymm.actors.modules.blocks import block_list, config_depth_names, find_blocks
from raymm.actors.modules.brief_error import because
from raymm.actors.weights.source import ModuleSource, on_meta
from raymm.errors import USER_CODE_RAISES, ProbeError

AnyModule = TypeVar("AnyModule", bound=nn.Module)

PROBE_DEPTH = 3
_PROBE_VOCABULARY = 256
_PROBE_INTERMEDIATE = 128
_INTERMEDIATE_NAMES = ("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "d_ff")
_TOKEN_NAMES = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
_SPECIAL = re.compile(r"token_(id|index)$")
_NOISE = 0.02
# The smallest copy of the source that was tried last, by its skeleton.
_latest: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
# Limit for copies at full size: 2 GB each, with a few copies at a time.
_MOST_PARAMETERS = 500_000_000


def small_model(source: ModuleSource) -> nn.Module:
    """Return a small copy with random weights, on the CPU, in eval mode.

    Raises:
        ProbeError: no copy can be made.
    """
    return next(small_models(source))


def small_models(source: ModuleSource) -> Iterator[nn.Module]:
    """Yield small copies, the smallest first, and last one of full size, if it is not too large.

    Random weights of a wide model take seconds, so the smallest copy of the latest source is kept.
    Callers get copies of it, which they may change.

    Raises:
        ProbeError: no copy can be made.
    """
    skeleton = source.skeleton()
    if skeleton in _latest:
        yield trial_copy(_latest[skeleton])
        yield from islice(_made_models(source, skeleton), 1, None)
        return
    for number, model in enumerate(_made_models(source, skeleton)):
        if number == 0:
            _latest.clear()
            # A module that keeps a tensor computed from its parameters cannot be copied.
            with contextlib.suppress(*USER_CODE_RAISES):
                _latest[skeleton] = trial_copy(model)
        yield model


def trial_copy(model: AnyModule) -> AnyModule:
    """Return a deep copy whose parameters share memory with the model's until one is written."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(_lazy_clone(parameter.detach()), parameter.requires_grad)
        for parameter in model.parameters() if type(parameter) is nn.Parameter
    }
    return copy.deepcopy(model, memo)


def _lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return torch._lazy_clone(tensor)  # pyright: ignore[reportPrivateImportUsage]
    except RuntimeError:  # torch does not own the memory: a mapped file, or an array of NumPy
        return tensor.clone()


def _made_models(source: ModuleSource, skeleton: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(skeleton, PreTrainedModel):
        yield _ready(source.as_made(_random_copy(skeleton)))
        return
    kinds, count, failed = _kinds(skeleton), 0, []
    for config in _configs(skeleton, kinds):
        try:
            model = source.as_made(_of_config(skeleton, config()))
        except USER_CODE_RAISES as error:  # whatever a model's own checks raise
            failed.append(error)
            continue
        small_kinds = _kinds(model)
        if set(kinds) <= set(small_kinds) or len(small_kinds) == len(kinds):
            count += 1
            yield _ready(model)
    if not count:
        raise ProbeError(
            f"cannot make a small {type(skeleton).__name__} to test how it is "
            f"cut{because(failed[0])}; give it one stage (pp 1)"
        ) from failed[0]


def _configs(
    skeleton: PreTrainedModel, kinds: list[tuple]
) -> Iterator[Callable[[], PretrainedConfig]]:
    for depth in dict.fromkeys((None, _last_new(kinds) + 1, len(kinds))):
        yield partial(shrink_config, skeleton.config, depth)
    yield partial(shrink_config, skeleton.config, narrow=False)
    if parameters_of(skeleton) <= _MOST_PARAMETERS:
        yield partial(copy.deepcopy, skeleton.config)


def parameters_of(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def special_ids(config: PretrainedConfig) -> dict[int, int]:
    """Map ids of special tokens (placeholders and their delimiters) to ids in a small vocabulary.

    The map is empty if the model's own vocabulary is small.
    """
    ids: set[int] = set()
    if (getattr(config.get_text_config(), "vocab_size", None) or 0) <= _PROBE_VOCABULARY:
        return {}

    def look(part: PretrainedConfig) -> None:
        for name, value in vars(part).items():
            if isinstance(value, PretrainedConfig):
                look(value)
            elif _is_special(name) and type(value) is int and value >= 0:
                ids.add(value)

    look(config)
    return {value: 1 + number for number, value in enumerate(sorted(ids))}


def small_ids(config: PretrainedConfig, small: PretrainedConfig, ids: torch.Tensor) -> torch.Tensor:
    """Convert int64 ids of a model's vocabulary to those of a small copy."""
    sizes = [text.vocab_size for text in (config.get_text_config(), small.get_text_config())]
    if sizes[0] == sizes[1]:
        return ids
    special = special_ids(config)
    first = len(special) + 1
    mapped = first + ids % (_PROBE_VOCABULARY - first)
    for value, replacement in special.items():
        mapped = torch.where(ids == value, replacement, mapped)
    return mapped


def _is_special(name: str) -> bool:
    return bool(_SPECIAL.search(name)) and name not in _TOKEN_NAMES


def shrink_config(
    config: PretrainedConfig, depth: int | None = None, narrow: bool = True,
    ids: Mapping[int, int] | None = None,
) -> PretrainedConfig:  # fmt: skip
    """Return a copy with few layers, narrow feed-forwards and a small vocabulary.

    Args:
        depth: keep the first ``depth`` layers; by default a few, with every kind among them.
        narrow: True to narrow feed-forwards.
        ids: :func:`special_ids` of the enclosing configuration.
    """
    small = copy.deepcopy(config)
    ids = special_ids(config) if ids is None else ids
    names = config_depth_names(small)
    layers = getattr(small, names[0]) if names else None
    per_layer = {
        name: list(value)
        for name, value in vars(small).items()
        if isinstance(value, list | tuple) and layers and len(value) == layers
    }
    kept_layers = _layers_of_every_kind(per_layer, layers or PROBE_DEPTH)
    if depth is not None and layers is not None:
        kept_layers = list(range(min(depth, layers)))
    for name in names:
        with contextlib.suppress(NotImplementedError):  # ProphetNet derives it from others
            setattr(small, name, len(kept_layers))
    for name, value in per_layer.items():
        setattr(small, name, [value[layer] for layer in kept_layers])
    for name, value in list(vars(small).items()):
        if isinstance(value, PretrainedConfig):  # config of a part, such as a tower
            setattr(small, name, shrink_config(value, depth, narrow, ids))
        elif _is_special(name) and type(value) is int:
            setattr(small, name, ids.get(value, value))
        elif layers and _numbers_layers(name, value, layers) and len(value) <= len(kept_layers):
            setattr(small, name, type(value)(range(len(value))))
    for name in _INTERMEDIATE_NAMES if narrow else ():
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, min(getattr(small, name), _PROBE_INTERMEDIATE))
    if isinstance(getattr(small, "vocab_size", None), int):
        small.vocab_size = min(small.vocab_size, _PROBE_VOCABULARY)
        for name in _TOKEN_NAMES:
            if isinstance(getattr(small, name, None), int | list):
                setattr(small, name, 0)
    return small


def _numbers_layers(name: str, value: object, layers: int) -> bool:
    """Return True for a list of layer numbers."""
    return (
        isinstance(value, list | tuple) and 0 < len(value) < layers and "ind" in name
        and all(type(layer) is int and 0 <= layer < layers for layer in value)
        and len(set(value)) == len(value)
    )


def _layers_of_every_kind(per_layer: dict[str, list[Any]], depth: int) -> list[int]:
    """Return the first :data:`PROBE_DEPTH` layers, replaced or extended to cover all kinds.

    Kinds are distinguished by lists of names (``layer_types``).
    """
    kinds = [v for v in per_layer.values() if all(isinstance(kind, str) for kind in v)]
    needed = {tuple(v[layer] for v in kinds): layer for layer in reversed(range(depth))}
    chosen = sorted(needed.values()) if kinds else []
    chosen += [layer for layer in range(depth) if layer not in chosen][: PROBE_DEPTH - len(chosen)]
    return sorted(chosen)


def _kinds(model: nn.Module) -> list[tuple]:
    """Return each block's kind: the classes of its submodules and their flags."""
    path = find_blocks(model)
    if path is None:
        return []
    return [
        tuple(
            (name, type(child), *_flags(child))
            for name, child in block.named_modules()
        )
        for block in block_list(model, path)
    ]  # fmt: skip


def _flags(module: nn.Module) -> list[tuple[str, object]]:
    return [
        (name, value) for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name != "training"
        and (value is None or isinstance(value, bool | str))
    ]  # fmt: skip


def _last_new(kinds: list[tuple]) -> int:
    """Return the index of the last block with a new kind, at least that of the third block."""
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    return max([PROBE_DEPTH - 1, *first.values()])


def _of_config(skeleton: PreTrainedModel, config: PretrainedConfig) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return type(skeleton)._from_config(config, dtype=torch.float32)


def _random_copy(skeleton: nn.Module) -> nn.Module:
    model = copy.deepcopy(on_meta(skeleton)).to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter.data, std=0.05)
    for name, buffer in skeleton.named_buffers():
        model.get_buffer(name).copy_(buffer)
    return model


def _ready(model: nn.Module) -> nn.Module:
    """Return a model in eval mode with all parameters trained, noise added, and router losses
    disabled."""
    for config in switched_on(model):
        setattr(config, SWITCH, False)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(1)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter += _NOISE * torch.randn_like(parameter)
    return model.requires_grad_(True).eval()
