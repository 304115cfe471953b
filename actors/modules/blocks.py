"""Finding the list of blocks a module can be cut between, and what runs through them."""

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
    """Names under which a Hugging Face config holds its number of layers."""
    return [name for name in _DEPTH_NAMES if isinstance(getattr(config, name, None), int)]


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def find_blocks(module: nn.Module) -> str | None:
    """Dotted name of the list of blocks, or None if the module has none.

    It is the ``ModuleList`` (or ``Sequential`` of numbered entries) whose length is the config's
    layer count, or, without a config, any of at least two entries; the largest by parameters. Of a
    language model with towers it is one of its decoder.
    """
    searched = _decoder(module)
    config = getattr(searched, "config", None)
    depths = {getattr(config, name) for name in config_depth_names(config)}
    inside = {id(child) for child in searched.modules()}
    lists = [
        (name, child)
        for name, child in module.named_modules()
        if name and isinstance(child, nn.ModuleList | nn.Sequential)
        and len(child) > 0 and id(child) in inside and _is_numbered(child)
    ]
    matching = [(n, c) for n, c in lists if len(c) in depths]
    candidates = matching or [(n, c) for n, c in lists if len(c) > 1]
    if not candidates:
        return None
    return max(candidates, key=lambda item: _numel(item[1]))[0]


def block_list(module: nn.Module, blocks: str) -> nn.ModuleList:
    """The list of blocks of this dotted name (of :func:`find_blocks`); a ``Sequential`` is one,
    too, in all that blocks are taken by."""
    return cast(nn.ModuleList, module.get_submodule(blocks))


def method_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """A method of the module's own class, of which ``nn.Module`` knows nothing."""
    return getattr(module, name)


def input_embeddings(module: nn.Module) -> nn.Embedding:
    """The table of token embeddings of a transformers model."""
    return cast(nn.Embedding, method_of(module, "get_input_embeddings")())


def _is_numbered(entries: nn.ModuleList | nn.Sequential) -> bool:
    """Whether entries are called by their numbers, by which their parameters are told apart."""
    return all(name == str(index) for index, name in enumerate(entries._modules))


SEARCHED = "raymm_searched"
"""Attribute of a part of a model: the name of the submodule that has its blocks."""


def _decoder(module: nn.Module) -> nn.Module:
    """The part of a language model that its head reads, or that the module says; any other module
    itself."""
    if (searched := vars(module).get(SEARCHED)) is not None:
        return module.get_submodule(searched)
    head = getattr(module, "get_output_embeddings", lambda: None)
    if head() is None:
        return module
    decoder = getattr(module, "get_decoder", lambda: None)()
    return decoder if isinstance(decoder, nn.Module) else module


def checkpoints_itself(module: nn.Module) -> bool:
    """Whether a transformers model runs layers again in its backward by its own means."""
    return any(getattr(part, "gradient_checkpointing", False) for part in module.modules())


def num_blocks(module: nn.Module) -> int:
    """How many blocks the module has; 1 if it cannot be cut."""
    name = find_blocks(module)
    return len(block_list(module, name)) if name else 1


def hidden_name(block: nn.Module) -> str:
    """How a block calls the hidden state, where it gets it by name: ``hidden_states``, or, of a
    forward that knows no such argument, its first parameter."""
    return _hidden_parameter(type(block))


def hidden_state(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The hidden state among what a block is called with.

    Args:
        block: whose forward is called.
        args, kwargs: of that call; the hidden state is a tensor (B, T, H).
    """
    return args[0] if args else kwargs[hidden_name(block)]


@functools.cache
def _hidden_parameter(block: type[nn.Module]) -> str:
    usual = "hidden_states"
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    parameters = list(inspect.signature(block.forward).parameters.values())[1:]  # without self
    if not parameters or parameters[0].kind not in named or usual in {p.name for p in parameters}:
        return usual
    return parameters[0].name
