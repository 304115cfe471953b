"""Example inputs for an encoder, guessed from its config and the signature of its forward.

Nothing here knows a model by name. Config values and parameter names give a few candidates (an
image, a video, packed patches, a waveform, spectrograms of both orientations). The first one that
runs is used.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, overload

import torch
from torch import nn

from raymm.actors.modules.blocks import method_of
from raymm.actors.modules.brief_error import brief
from raymm.actors.probe.small_model import trial_copy
from raymm.errors import USER_CODE_RAISES, ModelError

IMAGE_SIZE = 224
FRAMES = 200
SAMPLES = 16000
_MEL_NAMES = (
    "num_mel_bins", "input_feat_size", "num_mel_features", "mel_bins", "n_mels", "feature_size",
    "input_dim", "feat_dim", "feature_projection_input_dim",
)  # fmt: skip
_TEXT = ("input_ids", "decoder_input_ids", "decoder_inputs_embeds", "inputs_embeds")
Inputs = dict[str, Any]


def example_inputs(model: nn.Module) -> Inputs:
    """Return random inputs that the encoder's forward accepts.

    Args:
        model: on the CPU with weights, or on the meta device; not modified.

    Raises:
        ModelError: none of the candidates runs; the message has the attempts and asks for
            ``example_inputs``.
    """
    name = type(model).__name__
    if (encoder := _inner_encoder(model)) is not None:
        raise ModelError(
            f"{name} is an encoder with a decoder, which takes text too; the encoder alone is "
            f"model_class {encoder!r}"
        )
    trial = trial_copy(model)  # some models store tensors of their last forward
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    tried = []
    for inputs in _candidates(model):
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(0)
                trial(**{
                    name: value.to(device) if isinstance(value, torch.Tensor) else value
                    for name, value in copy.deepcopy(inputs).items()
                })
        except USER_CODE_RAISES as error:  # whatever a model may raise
            tried.append(f"{in_words(inputs)} ends in {brief(error)}")
        else:
            return inputs
    main = _main_input(model, list(_parameters(model)))
    why = f"; tried: {'; '.join(tried)}" if tried else ""
    raise ModelError(
        f"cannot guess inputs named {main!r} for {name}; give example_inputs as a batch has them "
        f"for the encoder: ModalityModule(..., example_inputs={{{main!r}: tensor}}), or in a "
        f"configuration example_inputs: {{{main}: {{shape: [...], dtype: float32}}}}{why}"
    )


def in_words(inputs: Mapping[str, Any]) -> str:
    """Return a description such as ``pixel_values (1, 3, 8, 8) float32``."""
    return ", ".join(
        f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        if isinstance(value, torch.Tensor) else f"{name} {value!r}"
        for name, value in inputs.items()
    )


def _inner_encoder(model: nn.Module) -> str | None:
    """Return the class name of an encoder-decoder's encoder; None for other models."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    if not set(_parameters(model)) & set(_TEXT):
        return None
    try:
        inner = method_of(model, "get_encoder")()
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return type(inner).__name__ if inner is not model else None


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the named parameters of the forward."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(model.forward).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in named}


def _main_input(model: nn.Module, names: list[str]) -> str:
    """Return the name of the main input, by default the first of ``names``."""
    main: Any = getattr(model, "main_input_name", None)
    return main if main in names else names[0]


@dataclass(frozen=True)
class _Facts:
    """Access to config values that describe inputs."""

    config: Any
    generator: torch.Generator

    @overload
    def number(self, *names: str, default: int) -> int: ...

    @overload
    def number(self, *names: str) -> int | None: ...

    def number(self, *names: str, default: int | None = None) -> int | None:
        """Return the first of these config values that is a number."""
        values = (getattr(self.config, name, None) for name in names)
        return next((n for n in values if isinstance(n, int) and not isinstance(n, bool)), default)

    def pair(self, *names: str) -> tuple[int, int] | None:
        """Return a height and a width, stored as a number, a list or a mapping."""
        for name in names:
            value = getattr(self.config, name, None)
            if isinstance(value, Mapping):
                value = [value.get("height"), value.get("width")]
            if isinstance(value, int) and not isinstance(value, bool):
                return value, value
            if not isinstance(value, list | tuple):
                continue
            numbers = [n for n in value if type(n) is int]
            if numbers and len(numbers) == len(value):
                return numbers[-2 if len(numbers) > 1 else -1], numbers[-1]
        return None

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)


def _candidates(model: nn.Module) -> Iterator[Inputs]:
    """Yield possible inputs, the most likely first; none without a config."""
    config = getattr(model, "config", None)
    parameters = _parameters(model)
    if config is None or not parameters:
        return
    main = _main_input(model, list(parameters))
    facts = _Facts(config, torch.Generator().manual_seed(0))
    required = [
        name for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name != main
    ]
    if set(required) & set(_TEXT):
        return
    for kind in _kinds(main, parameters):
        for tensor, side_inputs in kind(facts):
            values = {name: side_inputs[name] for name in parameters if name in side_inputs}
            extra = {name: _extra(name, tensor) for name in required if name not in values}
            if all(value is not None for value in extra.values()):
                yield {main: tensor, **values, **extra}
                masks = {n: _extra(n, tensor) for n in parameters if n.endswith("_mask")}
                if masks := {n: v for n, v in masks.items() if n not in {**values, **extra}}:
                    yield {main: tensor, **values, **extra, **masks}


_Kind = Callable[[_Facts], Iterable[tuple[torch.Tensor, Inputs]]]


def _kinds(main: str, parameters: Mapping[str, Any]) -> list[_Kind]:
    if "grid_thw" in parameters or "image_grid_thw" in parameters:
        return [_packed_patches]
    if "spatial_shapes" in parameters:
        return [_padded_patches]
    if main == "input_values":
        return [_spectrograms, _waveforms]
    if main == "input_ids":
        return [_token_ids]
    if "pixel" in main or "image" in main:
        return [_videos, _images]
    if any(word in main for word in ("feature", "mel", "audio", "spectrogram")):
        return [_spectrograms]
    return [_images, _spectrograms, _waveforms] if main != "hidden_states" else []


def _token_ids(facts: _Facts) -> Iterator[tuple[torch.Tensor, Inputs]]:
    length = min(8, facts.number("max_position_embeddings", default=8))
    most = facts.number("vocab_size", default=length)
    yield torch.arange(length)[None] % most, {}


def _images(facts: _Facts) -> Iterator[tuple[torch.Tensor, Inputs]]:
    channels = facts.number("num_channels", "in_channels", "in_chans", default=3)
    stated = facts.pair("image_size", "img_size", "input_size")
    for height, width in dict.fromkeys((stated or (IMAGE_SIZE,) * 2, (IMAGE_SIZE,) * 2)):
        sizes = torch.tensor([[height, width]])
        yield facts.random(1, channels, height, width), {"image_sizes": sizes}


def _videos(facts: _Facts) -> Iterator[tuple[torch.Tensor, Inputs]]:
    frames = facts.number("num_frames", "frames_per_clip")
    if frames is None:
        return
    for image, _ in _images(facts):
        yield facts.random(1, frames, *image.shape[1:]), {}


def _packed_patches(facts: _Facts) -> Iterator[tuple[torch.Tensor, Inputs]]:
    """Yield one item as rows of patches."""
    channels = facts.number("in_channels", "in_chans", "num_channels", default=3)
    patch = prod(facts.pair("patch_size") or (16, 16))
    side = 4 * (facts.number("spatial_merge_size", default=2) or 2)
    temporal = facts.number("temporal_patch_size", default=1) or 1
    grid = torch.tensor([[1, side, side]])
    for width in dict.fromkeys((channels * temporal * patch, channels * patch)):
        rows = facts.random(side * side, width)
        yield rows, {"grid_thw": grid, "image_grid_thw": grid}


def _padded_patches(facts: _Facts) -> Iterator[tuple[torch.Tensor, Inputs]]:
    """Yield one item's patches, padded to a fixed number."""
    channels = facts.number("num_channels", "in_channels", default=3)
    width = channels * prod(facts.pair("patch_size") or (16, 16))
    count = facts.number("num_patches", default=64) or 64
    side = int(count**0.5)
    seen = torch.ones(1, count, dtype=torch.long)
    seen[:, side * side :] = 0
    yield facts.random(1, count, width), {
        "spatial_shapes": torch.tensor([[side, side]]),
        "pixel_attention_mask": seen,
        "attention_mask": seen,
    }


def _waveforms(facts: _Facts) -> Iterator[tuple[torch.Tensor, Inputs]]:
    yield facts.random(1, SAMPLES), {}
    yield facts.random(1, 1, SAMPLES), {}


def _spectrograms(facts: _Facts) -> Iterator[tuple[torch.Tensor, Inputs]]:
    """Yield (1, frames, mels), (1, mels, frames), with a channel, packed, and as a square image."""
    bins = list(dict.fromkeys(n for name in _MEL_NAMES if (n := facts.number(name))))
    # Short lengths first: some models accept any length, others only that of their config.
    lengths = [FRAMES]
    lengths += [n] if (n := facts.number("max_length")) and n > FRAMES // 2 else []
    lengths += [2 * n] if (n := facts.number("max_source_positions")) else []
    for mels in bins:
        for frames in dict.fromkeys(lengths):
            for shape in ((1, mels, frames), (1, frames, mels), (1, 1, frames, mels)):
                yield facts.random(*shape), _lengths(1, frames)
            yield facts.random(mels, frames), _lengths(1, frames)
    if (size := facts.pair("spec_size")) is not None and bins:
        frames = size[0] * size[1] // bins[0]
        yield facts.random(1, 1, frames, bins[0]), {"is_longer": torch.ones(1, 1).bool()}
        channels = facts.number("patch_embed_input_channels", default=1)
        yield (
            facts.random(1, channels * 4, frames, bins[0]), {"is_longer": torch.ones(1, 1).bool()}
        )


def _lengths(items: int, frames: int) -> Inputs:
    length = torch.full((items,), frames)
    return {"feature_lens": length, "input_lengths": length, "feature_lengths": length}


def _extra(name: str, main: torch.Tensor) -> torch.Tensor | None:
    """Return a further input, guessed from its name."""
    if "mask" in name:
        frames = max(main.shape[1:]) if main.dim() > 1 else len(main)
        return torch.ones(len(main), frames, dtype=torch.bool)
    if "len" in name:
        return torch.full((len(main),), max(main.shape[1:]))
    return None
