"""Inputs for a model class, derived from its parameter names and its configuration."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from raymm.actors.probe.example_inputs import example_inputs
from raymm.errors import ModelError

ITEMS, TOKENS = 2, 12
_SECOND = 1600  # samples of a short audio clip
_FRAMES = 64


def text_microbatches(vocabulary: int, count: int = 2) -> list[dict[str, torch.Tensor]]:
    """Return ids, labels and masks of two rows; from the second microbatch the second row is
    shorter.
    """
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        ids = torch.randint(3, min(vocabulary, 99), (ITEMS, TOKENS), generator=generator)
        mask = torch.ones_like(ids)
        if number:
            mask[1, TOKENS - 3 :] = 0
        found.append(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "labels": ids.masked_fill(mask == 0, -100),
            }
        )
    return found


def item_candidates(
    model: nn.Module, config: PretrainedConfig, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield inputs to try an encoder with, the likeliest first."""
    names = [n for n in inspect.signature(type(model).forward).parameters if n != "self"]
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    first = names[0]
    makers = _MAKERS.get(first, _IMAGES)
    for make in makers:
        yield from make(first, names, config, random)
    with contextlib.suppress(ModelError):  # raymm's own guess
        yield {
            name: value * (1 + seed / 3) if value.is_floating_point() else value
            for name, value in example_inputs(model).items()
        }


def _get(config: PretrainedConfig, *names: str, default: Any = None) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def _side(value: Any) -> int:
    return value[0] if isinstance(value, list | tuple) else value


def _images(first: str, names: list[str], config: PretrainedConfig, random: Any) -> Iterator[dict]:
    channels = _get(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) else 3
    backbone = _get(config, "backbone_config", default=config)
    size = _get(config, "image_size", "img_size", default=None) or _get(backbone, "image_size")
    sizes = [size] if isinstance(size, int | list | tuple) else []
    for side in [*sizes, 32, 64, 224]:
        height, width = side if isinstance(side, list | tuple) else (side, side)
        if "grid_thw" in names or "spatial_shapes" in names:
            break
        yield {first: random(ITEMS, channels, height, width)}
    if isinstance(frames := _get(config, "num_frames"), int) and sizes:  # frames of videos
        height, width = (size, size) if isinstance(size, int) else size
        yield {first: random(ITEMS * frames, channels, height, width)}


def _videos(first: str, names: list[str], config: PretrainedConfig, random: Any) -> Iterator[dict]:
    if "grid_thw" in names:
        return
    channels, size = (
        _get(config, "num_channels", "in_chans", default=3),
        _get(config, "image_size", "crop_size", default=32),
    )
    frames = _get(config, "num_frames", "frames_per_clip", default=2)
    if isinstance(channels, int) and isinstance(size, int | list | tuple):
        yield {first: random(ITEMS, frames, channels, _side(size), _side(size))}
        yield {first: random(ITEMS, frames, _side(size), _side(size), channels)}


def _packed(first: str, names: list[str], config: PretrainedConfig, random: Any) -> Iterator[dict]:
    """Return patches of all images as one list of rows, with the grids of the images."""
    grid_name = next((n for n in names if n in ("grid_thw", "image_grid_thw")), None)
    channels = _get(config, "in_channels", "in_chans", "num_channels", default=3)
    patch = _side(_get(config, "patch_size", default=14))
    merge = _side(_get(config, "spatial_merge_size", "merge_size", default=2))
    times = _get(config, "temporal_patch_size", default=1)
    side = 2 * merge
    if grid_name is not None:
        grid = torch.tensor([[1, side, side]] * ITEMS)
        rows = ITEMS * side * side
        more: dict[str, Any] = {}
        if "merge_sizes" in names:
            more["merge_sizes"] = torch.tensor([merge] * ITEMS)
        for shape in (
            (rows, channels * times * patch * patch),
            (rows, channels, patch, patch),
            (rows, channels * patch * patch),
            (rows, 2 * channels * patch * patch),  # two frames
            (rows, channels, times, patch, patch),
            (rows, times, channels, patch, patch),
        ):
            yield {first: random(*shape), grid_name: grid, **more}
        yield {first: random(1, rows, channels, patch, patch), grid_name: grid, **more}
        wide = merge * patch  # patches of one token
        yield {first: random(rows, wide, wide, channels), grid_name: grid, **more}
    elif isinstance(channels, int) and "temporal_patch_size" in vars(config):
        yield {first: random(ITEMS, times, patch, patch, channels)}


def _patches(first: str, names: list[str], config: PretrainedConfig, random: Any) -> Iterator[dict]:
    """Return the patches of every image as rows, with their positions."""
    channels = _get(config, "num_channels", "in_channels", default=3)
    patch = _side(_get(config, "patch_size", default=16))
    if not isinstance(channels, int) or not isinstance(patch, int):
        return
    wide = channels * patch * patch
    if "spatial_shapes" in names:
        yield {
            first: random(ITEMS, 16, wide),
            "pixel_attention_mask": torch.ones(ITEMS, 16, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4]] * ITEMS),
        }
    if "pixel_position_ids" in names or "image_position_ids" in names:
        name = "pixel_position_ids" if "pixel_position_ids" in names else "image_position_ids"
        pool = _get(config, "pooling_kernel_size", default=1)
        side = 2 * pool
        places = torch.stack(
            torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1
        )
        yield {
            first: random(ITEMS, side * side, wide),
            name: places.reshape(1, -1, 2).repeat(ITEMS, 1, 1),
        }
    if "aspect_ratio_ids" in names:
        size, tiles = config.image_size, config.max_num_tiles
        yield {
            first: random(1, ITEMS, tiles, channels, size, size),
            "aspect_ratio_ids": torch.ones(1, ITEMS, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(1, ITEMS, tiles, dtype=torch.long),
        }
    if "target_sizes" in names:
        yield {
            first: random(1, channels, patch, ITEMS * 16 * patch),
            "target_sizes": torch.tensor([[4, 4]] * ITEMS),
        }
    if "image_sizes" in names:
        side = 4 * patch
        yield {
            first: random(ITEMS, channels, side, side),
            "image_sizes": torch.tensor([[side, side]] * ITEMS),
        }
    if first == "flattened_patches":
        hidden = _get(config, "patch_embed_hidden_size", default=None)
        for width in (wide, hidden):
            if width:
                places = torch.arange(1, 17).float()[None, :, None].expand(ITEMS, 16, 1)
                rows = torch.cat([places, (places % 4) + 1, random(ITEMS, 16, width)], -1)
                yield {first: rows, "attention_mask": torch.ones(ITEMS, 16)}
    if first == "patch_embeds" and isinstance(hidden := _get(config, "hidden_size"), int):
        yield {first: random(ITEMS, hidden, 4, 4)}
    if "scaled_images_ratios" in vars(config):
        side = int(patch / min(config.scaled_images_ratios))
        yield {first: random(ITEMS, channels, side, side)}
    yield {first: random(ITEMS, 16, wide)}
    if isinstance(count := _get(config, "num_position_embeddings"), int):
        yield {first: random(ITEMS, count, wide)}
    yield {first: random(16, wide)}
    hidden = _get(config, "hidden_size", "embed_dim", "input_dim", default=None)
    if isinstance(hidden, int):
        yield {first: random(ITEMS, 16, hidden)}
        if "attention_mask" in names:
            yield {first: random(ITEMS, 16, hidden), "attention_mask": torch.ones(ITEMS, 16)}


def _features(
    first: str, names: list[str], config: PretrainedConfig, random: Any
) -> Iterator[dict]:
    bins = _get(
        config, "input_size", "num_mel_bins", "input_feat_size", "feature_size", "input_dim",
        "num_mel_channels", "feature_projection_input_dim", "input_feat_per_channel", "n_mels",
        default=80,
    )  # fmt: skip
    encoder = _get(config, "encoder_config", "asr_config", default=None)
    if encoder is not None:
        bins = _get(encoder, "num_mel_bins", "input_dim", default=bins)
    # Gemma 4 has as many bins as channels in the first layer
    channels = _get(config, "subsampling_conv_channels")
    bins = channels[0] if isinstance(channels, list | tuple) else bins
    positions = _get(config, "max_source_positions", default=None)
    length = _get(config, "max_length", default=_FRAMES)
    for frames in [
        *([2 * positions, positions] if isinstance(positions, int) else []),
        _FRAMES,
        length,
    ]:
        stacked = (ITEMS, frames, 4 * bins)  # several stacked frames
        for shape in (
            (ITEMS, bins, frames), (ITEMS, frames, bins), (ITEMS, 1, frames, bins), stacked,
        ):  # fmt: skip
            made = {first: random(*shape)}
            yield made
            wanted = {
                n: torch.ones(ITEMS, frames, dtype=torch.long)
                for n in names
                if n in ("input_features_mask", "attention_mask", "feature_attention_mask", "mask")
            }
            if wanted:
                yield made | wanted
            for n in ("audio_mel_mask",):
                if n in names:
                    yield made | {n: torch.zeros(ITEMS, frames, dtype=torch.bool)}
            if "is_longer" in names:
                yield made | {"is_longer": torch.zeros(ITEMS, 1, dtype=torch.bool)}
    if "feature_lens" in names:
        lengths = torch.tensor([_FRAMES] * ITEMS)
        after = (lengths - 1) // 2 + 1
        made = {first: random(bins, ITEMS * _FRAMES), "feature_lens": lengths}
        if "aftercnn_lens" in names:
            made["aftercnn_lens"] = after
        yield made
    if "chunk_sample_lengths" in names:
        yield {
            first: random(ITEMS, bins, _FRAMES),
            "chunk_sample_lengths": torch.tensor([_FRAMES] * ITEMS),
        }


def _waves(first: str, names: list[str], config: PretrainedConfig, random: Any) -> Iterator[dict]:
    frames = _get(config, "max_length", default=None)
    bins = _get(config, "num_mel_bins", default=None)
    if isinstance(frames, int) and isinstance(bins, int):
        yield {first: random(ITEMS, frames, bins)}
    semantic = _get(config, "semantic_model_config", default=config)
    width = _get(semantic, "feature_projection_input_dim", "feature_size", default=160)
    for samples in (_SECOND, 6 * _SECOND, 16000):
        yield {first: random(ITEMS, samples)}
        yield {first: random(ITEMS, 1, samples)}
        yield {first: random(ITEMS, 1, samples), "padding_mask": torch.ones(ITEMS, samples)}
        yield {
            first: random(ITEMS, 1, samples),
            "input_features": random(ITEMS, 50, width),
        }
    hidden = _get(config, "hidden_size", default=None)
    if isinstance(hidden, int):
        yield {first: random(ITEMS, 16, hidden)}


_IMAGES = (_packed, _images, _videos, _patches)
_MAKERS = {
    "input_values": (_waves, _features),
    "input_features": (_features, _waves),
    "audio_mel": (_features,),
    "flattened_patches": (_patches,),
    "hidden_states": (_packed, _patches, _images, _features),
    "pixel_values_videos": (_videos, _images),
}
