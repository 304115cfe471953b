"""The probe: learn, on a shrunk copy, how a model class can be cut; refuse what cannot be.

Nothing here knows a model by name. A copy with few layers and a small vocabulary runs
whole and in pieces on the CPU (:mod:`raymm.actors.stages.probe_pieces`); the pieces must give the
same bits as the whole, and the gradients that reach parameters outside the blocks say which pieces
need them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from raymm.actors.stages.blocks import config_depth_names, find_blocks
from raymm.actors.stages.cut import CutInfo
from raymm.actors.stages.example_inputs import ExampleError, brief, example_inputs, in_words
from raymm.actors.stages.probe_error import ProbeError
from raymm.actors.stages.probe_pieces import Run, compare_pieces, skips_blocks
from raymm.actors.stages.source import ModuleSource, on_meta, set_mode

PROBE_DEPTH = 3
_PROBE_VOCABULARY = 256
_PROBE_INTERMEDIATE = 128
_INTERMEDIATE_NAMES = ("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "d_ff")
_TOKEN_NAMES = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


def shrink_config(config: PretrainedConfig) -> PretrainedConfig:
    """A copy with few layers, one of every kind among them, narrow feed-forwards and a small
    vocabulary."""
    small = copy.deepcopy(config)
    names = config_depth_names(small)
    depth = getattr(small, names[0]) if names else None
    per_layer = {
        name: list(value)
        for name, value in vars(small).items()
        if isinstance(value, list | tuple) and depth and len(value) == depth
    }
    kept = _layers_of_every_kind(per_layer, depth or PROBE_DEPTH)
    for name in names:
        setattr(small, name, len(kept))
    for name, value in per_layer.items():
        setattr(small, name, [value[layer] for layer in kept])
    for name in _INTERMEDIATE_NAMES:
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, min(getattr(small, name), _PROBE_INTERMEDIATE))
    if isinstance(getattr(small, "vocab_size", None), int):
        small.vocab_size = min(small.vocab_size, _PROBE_VOCABULARY)
        for name in _TOKEN_NAMES:
            if isinstance(getattr(small, name, None), int | list):
                setattr(small, name, 0)
    return small


def _layers_of_every_kind(per_layer: dict[str, list[Any]], depth: int) -> list[int]:
    """:data:`PROBE_DEPTH` layers, or all of fewer: the first ones, but with some layer of every
    kind that a list of names (``layer_types``) tells apart; more where there are more kinds."""
    kinds = [v for v in per_layer.values() if all(isinstance(kind, str) for kind in v)]
    needed = {tuple(v[layer] for v in kinds): layer for layer in reversed(range(depth))}
    kept = sorted(needed.values()) if kinds else []
    kept += [layer for layer in range(depth) if layer not in kept][: PROBE_DEPTH - len(kept)]
    return sorted(kept)


def small_model(source: ModuleSource) -> nn.Module:
    """A shrunk copy with random weights, on the CPU, in eval mode."""
    skeleton = source.skeleton()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if isinstance(skeleton, PreTrainedModel):
            model = type(skeleton)._from_config(shrink_config(skeleton.config), dtype=torch.float32)
        else:
            model = copy.deepcopy(on_meta(skeleton)).to_empty(device="cpu")
            for parameter in model.parameters():
                nn.init.normal_(parameter.data, std=0.05)
            _copy_buffers(skeleton, model)
    return model.requires_grad_(True).eval()


def _copy_buffers(source: nn.Module, target: nn.Module) -> None:
    for name, buffer in source.named_buffers():
        target.get_buffer(name).copy_(buffer)


def encoder_inputs(model: nn.Module, inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Inputs that a small copy of an encoder was tried with: these, or guessed ones.

    Raises:
        ProbeError: if its forward does not take them, or they cannot be guessed.
    """
    if inputs is None:
        try:
            return example_inputs(model)
        except ExampleError as error:
            raise ProbeError(str(error)) from error
    try:
        with torch.no_grad():
            copy.deepcopy(model)(**copy.deepcopy(dict(inputs)))
    except Exception as error:  # whatever a model may raise
        raise ProbeError(
            f"{type(model).__name__} does not take {in_words(inputs)}, which example_inputs give: "
            f"{brief(error)}; give what a batch has for the encoder"
        ) from error
    return dict(inputs)


def probe_language_model(source: ModuleSource) -> CutInfo:
    """:class:`CutInfo` of a causal language model that is fed ``inputs_embeds``.

    Raises:
        ProbeError: if it has no list of blocks, or its pieces differ from the whole.
    """
    model = small_model(source)
    return _probe(source, model, _language_run(model))


def _language_run(model: nn.Module) -> Run:
    ids = torch.arange(8)[None] % model.get_input_embeddings().weight.shape[0]

    def run(stage: nn.Module, first: bool) -> torch.Tensor:
        embeds = stage.get_input_embeddings()(ids)
        if not first:
            embeds = torch.zeros(embeds.shape)
        return stage(inputs_embeds=embeds, use_cache=False).logits

    return run


def probe_encoder(
    source: ModuleSource, inputs: dict[str, torch.Tensor] | None = None
) -> CutInfo:
    """:class:`CutInfo` of an encoder.

    Args:
        source: the encoder.
        inputs: example keyword arguments; guessed from the config when not given.

    Raises:
        ProbeError: as :func:`probe_language_model`.
    """
    model = small_model(source)
    return _probe(source, model, _encoder_run(model, inputs))


def _encoder_run(model: nn.Module, inputs: Mapping[str, Any] | None) -> Run:
    given = encoder_inputs(model, inputs)

    def run(stage: nn.Module, first: bool) -> torch.Tensor:
        return first_tensor(stage(**(given if first else ghost_inputs(given))))

    return run


def trains_without_blocks(
    source: ModuleSource, language_model: bool, inputs: Mapping[str, Any] | None = None
) -> bool:
    """Whether a training forward may leave out blocks.

    Args:
        source: the module.
        language_model: whether it is a causal language model.
        inputs: example keyword arguments of an encoder.

    Raises:
        ProbeError: no inputs to try it with.
    """
    if not set_mode(source.skeleton()).training:
        return False
    model = small_model(source)
    blocks = find_blocks(model)
    if blocks is None:
        return False
    run = _language_run(model) if language_model else _encoder_run(model, inputs)
    return skips_blocks(model.train(), blocks, run)


def ghost_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs whose floating-point tensors keep only their shapes."""
    return {
        name: torch.zeros((), dtype=value.dtype).expand(value.shape)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }


def first_tensor(output: Any) -> torch.Tensor:
    """The tensor itself, ``last_hidden_state`` of a model output, or a tuple's first entry.

    Raises:
        TypeError: if there is none.
    """
    if isinstance(output, torch.Tensor):
        return output
    if getattr(output, "last_hidden_state", None) is not None:
        return output.last_hidden_state
    if isinstance(output, tuple | list) and isinstance(output[0], torch.Tensor):
        return output[0]
    raise TypeError(f"no tensor in an encoder output of type {type(output).__name__}")


def _probe(source: ModuleSource, model: nn.Module, run: Run) -> CutInfo:
    name = type(model).__name__
    blocks = find_blocks(model)
    if blocks is None:
        raise ProbeError(f"{name} has no list of blocks to cut between; give it one stage")
    if len(model.get_submodule(blocks)) < 2:
        raise ProbeError(f"{name} has a single block; give it one stage")
    return compare_pieces(model, blocks, run, set_mode(source.skeleton()).training)
