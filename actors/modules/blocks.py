"""Search for the list of blocks between which a module can be cut."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn

_DEPTH_NAMES = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "depth", "num_encoder_layers", "num_decoder_layers", "num_blocks",
)


def config_depth_names(config: object) -> list[str]:
    """Return the names under which a Hugging Face config stores its number of layers."""
    return [name for name in _DEPTH_NAMES if isinstance(getattr(config, name, None), int)]


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def find_blocks(module: nn.Module) -> str | None:
    """Return the dotted name of the list of blocks, or None if the module has none. A candidate is
    a ``ModuleList``, or a ``Sequential`` of numbered entries, whose length is the config's layer
    count; without a match, any with at least two entries. The one with the most parameters wins.
    For a language model with towers, only its decoder is searched."""
    searched = _decoder(module)
    config = getattr(searched, "config", None)
    depths = {getattr(config, name) for name in config_depth_names(config)}
    searched_ids = {id(child) for child in searched.modules()}
    lists = [
        (name, child)
        for name, child in module.named_modules()
        if name and isinstance(child, nn.ModuleList | nn.Sequential)
        and len(child) > 0 and id(child) in searched_ids and _is_numbered(child)
    ]
    matching = [(n, c) for n, c in lists if len(c) in depths]
    candidates = matching or [(n, c) for n, c in lists if len(c) > 1]
    if not candidates:
        return None
    return max(candidates, key=lambda item: _numel(item[1]))[0]


def block_list(module: nn.Module, blocks: str) -> nn.ModuleList:
    """Return the list of blocks with this dotted name (a ``Sequential`` behaves the same)."""
    return cast(nn.ModuleList, module.get_submodule(blocks))


def method_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return a method of the module's own class that ``nn.Module`` does not declare."""
    return getattr(module, name)


def input_embeddings(module: nn.Module) -> nn.Embedding:
    """Return the token embeddings of a transformers model."""
    return cast(nn.Embedding, method_of(module, "get_input_embeddings")())


def _is_numbered(entries: nn.ModuleList | nn.Sequential) -> bool:
    """Return True if entries are named by their index, which parameter names rely on."""
    return all(name == str(index) for index, name in enumerate(entries._modules))


SEARCHED = "raymm_searched"
"""Attribute of a part of a model: name of the submodule that has its blocks."""


def _decoder(module: nn.Module) -> nn.Module:
    """Return the submodule to search: named by :data:`SEARCHED`, or a language model's decoder."""
    if (searched := vars(module).get(SEARCHED)) is not None:
        return module.get_submodule(searched)
    head = getattr(module, "get_output_embeddings", lambda: None)
    if head() is None:
        return module
    decoder = getattr(module, "get_decoder", lambda: None)()
    return decoder if isinstance(decoder, nn.Module) else module


def checkpoints_itself(module: nn.Module) -> bool:
    """Return True if a transformers model has its own gradient checkpointing enabled."""
    return any(getattr(child, "gradient_checkpointing", False) for child in module.modules())


def num_blocks(module: nn.Module) -> int:
    """Return the number of blocks; 1 if the module cannot be cut."""
    name = find_blocks(module)
    return len(block_list(module, name)) if name else 1


def hidden_name(block: nn.Module) -> str:
    """Return the name of a block's hidden-state parameter: ``hidden_states``, or its first
    parameter."""
    return _hidden_parameter(type(block))


def hidden_state(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the hidden state (B, T, H) from the arguments of a block's call."""
    return args[0] if args else kwargs[hidden_name(block)]


@functools.cache
def _hidden_parameter(block: type[nn.Module]) -> str:
    usual = "hidden_states"
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    parameters = list(inspect.signature(block.forward).parameters.values())[1:]  # without self
    if not parameters or parameters[0].kind not in named or usual in {p.name for p in parameters}:
        return usual
    return parameters[0].name
