"""Batches for vision-language models: text with placeholders for items of several sizes.

They are derived from the names of the forward's parameters and of the configuration's fields.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from benchmarks.shared.vlm_hints import HINTS, Hint, Item, Random
from raymm.actors.probe.vlm.calls import calls_of
from raymm.errors import ProbeError

_PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index", "image_patch_id", "im_patch_id"),
    "audio": ("audio_token_id", "audio_token_index", "speech_token_id"),
    "text": (),
}
_KINDS = {"image": 1, "audio": 3}  # values of mm_token_type_ids


@dataclass(frozen=True)
class Style:
    """Input format of items.

    Attributes:
        make: function that makes an item of the n-th size.
        per_row: True if rows of items have a separate dimension before that of items.
        wide: name of the tensor whose items are concatenated in its last dimension.
    """

    modality: str
    make: Callable[[int], Item]
    per_row: bool = False
    wide: str = ""

    def collate(self, rows: list[list[Item]]) -> Item:
        """Collate the items of several rows, in order."""
        if self.per_row:
            most = max(map(len, rows))
            filled = [
                _joined([*row, *[_nothing(rows) for _ in range(most - len(row))]]) for row in rows
            ]
            return {n: torch.stack([row[n] for row in _same_size(filled)]) for n in filled[0]}
        items = [item for row in rows for item in row]
        if not self.wide:
            return _joined(items)
        rest = _joined([{n: v for n, v in item.items() if n != self.wide} for item in items])
        return {self.wide: torch.cat([item[self.wide] for item in items], dim=-1), **rest}


def _nothing(rows: list[list[Item]]) -> Item:
    like = next(item for row in rows for item in row)
    return {name: torch.zeros_like(value) for name, value in like.items()}


def _joined(items: list[Item]) -> Item:
    items = _same_size(items)
    return {name: torch.cat([item[name] for item in items]) for name in items[0]}


def _same_size(items: list[Item]) -> list[Item]:
    """Pad items with zeros at the end of all dimensions except the first."""
    grown: list[Item] = [{} for _ in items]
    for name in items[0]:
        shape = [max(item[name].shape[d] for item in items) for d in range(items[0][name].dim())]
        for item, big in zip(items, grown, strict=True):
            value = item[name]
            nothing = -1 if name.endswith("position_ids") else 0
            padded = value.new_full((value.shape[0], *shape[1:]), nothing)
            padded[tuple(slice(size) for size in value.shape)] = value
            big[name] = padded
    return grown


def _hint(model: nn.Module) -> Hint:
    return HINTS.get(type(model).__name__, Hint())


def styles(model: nn.Module, config: PretrainedConfig) -> Iterator[Style]:
    """Yield input formats, the likeliest first."""
    names = set(inspect.signature(type(model).forward).parameters)
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if (hint := _hint(model)).make is not None:
        make = hint.make
        yield Style(hint.modality, lambda n: make(config, n, random), hint.per_row)
        return
    if "pixel_values" in names or "image_pixel_values" in names:
        yield from _image_styles(names, config, random)
    if not any("pixel" in name or "features" in name for name in names):
        yield Style("text", lambda n: {})
    if names & {"input_features", "input_values", "audio_input_features"}:
        yield from _audio_styles(names, config, random)


def _value(config: Any, *names: str, default: Any = None) -> Any:
    parts = [config] + [
        getattr(config, part) for part in ("vision_config", "audio_config", "encoder_config")
        if isinstance(getattr(config, part, None), PretrainedConfig)
    ]  # fmt: skip
    for name in names:
        for part in reversed(parts):
            if isinstance(value := getattr(part, name, None), int | list | tuple):
                return value[0] if isinstance(value, list | tuple) else value
    return default


def _image_styles(names: set[str], config: Any, random: Random) -> Iterator[Style]:
    first = "pixel_values" if "pixel_values" in names else "image_pixel_values"
    channels = _value(config, "in_channels", "in_chans", "num_channels", default=3)
    patch = _value(config, "patch_size", default=14)
    size = _value(config, "image_size", default=32)
    merge = _value(config, "spatial_merge_size", "merge_size", "downsample_factor", default=2)
    times = _value(config, "temporal_patch_size", default=1)
    grid_name = next((n for n in ("image_grid_thw", "image_grid_hw") if n in names), None)
    if grid_name:
        for shape in (
            (channels * times * patch * patch,), (channels, patch, patch),
            (channels * patch * patch,), (2 * channels * patch * patch,),
            (channels, times, patch, patch), (times, channels, patch, patch),
        ):  # fmt: skip
            def packed(n: int, shape: tuple[int, ...] = shape) -> Item:
                h, w = 2 * merge, (2 + n) * merge
                item = {first: random(h * w, *shape), grid_name: torch.tensor([[1, h, w]])}
                if grid_name == "image_grid_hw":
                    item[grid_name] = item[grid_name][:, 1:]
                if "image_merge_sizes" in names:
                    item["image_merge_sizes"] = torch.tensor([merge])
                return item

            yield Style("image", packed)
    wide = channels * patch * patch

    def rows(n: int) -> Item:
        h, w = 2 * merge, (2 + n) * merge
        return {
            first: random(1, h * w, wide), "pixel_attention_mask": torch.ones(1, h * w).long(),
            "spatial_shapes": torch.tensor([[h, w]]),
        }  # fmt: skip

    def places(n: int) -> Item:
        pool = _value(config, "pooling_kernel_size", default=1)
        h, w = 2 * pool, (2 + n) * pool
        grid = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(h), indexing="xy"), -1)
        return {first: random(1, h * w, wide), "image_position_ids": grid.reshape(1, -1, 2)}

    def strips(n: int) -> Item:
        h, w = 2 * merge, (2 + 2 * n) * merge
        return {
            first: random(1, channels, patch, h * w * patch), "target_sizes": torch.tensor([[h, w]])
        }

    if "target_sizes" in names:
        yield Style("image", strips, wide=first)
    if "spatial_shapes" in names:
        yield Style("image", rows)
    if "image_position_ids" in names:
        yield Style("image", places)
    for side in dict.fromkeys((size, 2 * patch * merge, 2 * patch, 64)):
        yield from _pictures(names, first, channels, side, patch, merge, random, config)


def _pictures(
    names: set[str], first: str, channels: int, side: int, patch: int, merge: int, random: Random,
    config: Any,
) -> Iterator[Style]:  # fmt: skip
    def picture(n: int) -> Item:
        item = {first: random(1, channels, side, side)}
        if "high_res_pixel_values" in names:
            high = _value(config.high_res_vision_config, "image_size", default=64)
            item["high_res_pixel_values"] = random(1, channels, high, high)
        if "qformer_input_ids" in names:
            item["qformer_input_ids"] = torch.full((1, 4), 5)
            item["qformer_attention_mask"] = torch.ones(1, 4, dtype=torch.long)
        return item

    def sized(n: int) -> Item:
        h, w = 2 * patch * merge, (2 + n) * patch * merge
        return {first: random(1, channels, h, w), "image_sizes": torch.tensor([[h, w]])}

    def tiles(n: int) -> Item:
        return {
            first: random(1, 1 + 2 * (n + 1), channels, side, side),
            "image_sizes": torch.tensor([[(n + 1) * side, 2 * side]]),
        }

    def five(n: int) -> Item:
        item = {first: random(1, channels, side, side)}
        if "pixel_attention_mask" in names:
            mask = torch.ones(1, side, side, dtype=torch.bool)
            item["pixel_attention_mask"] = mask
        return item

    def cross(n: int) -> Item:
        most = _value(config, "max_num_tiles", default=4)
        return {
            first: random(1, most, channels, side, side),
            "aspect_ratio_ids": torch.ones(1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(1, most, dtype=torch.long),
        }

    if "aspect_ratio_ids" in names:
        yield Style("image", cross, per_row=True)
        return
    if "pixel_attention_mask" in names:
        yield Style("image", five, per_row=True)
    if "image_sizes" in names:
        yield Style("image", sized)
        yield Style("image", tiles)
    yield Style("image", picture)
    yield Style("image", five, per_row=True)


def _audio_styles(names: set[str], config: Any, random: Random) -> Iterator[Style]:
    first = next(
        n for n in ("input_features", "input_values", "audio_input_features") if n in names
    )
    bins = _value(
        config, "num_mel_bins", "input_feat_size", "input_size", "input_dim", "n_mels", default=80
    )
    positions = _value(config, "max_source_positions", default=None)
    masks = [
        n for n in ("input_features_mask", "feature_attention_mask", "input_values_mask")
        if n in names
    ]  # fmt: skip
    for frames in dict.fromkeys(([2 * positions] if positions else []) + [64, 100, 128, 400]):
        for shape in ((1, bins, frames), (1, frames, bins), (1, frames), (1, 1, 40 * frames)):
            def sound(n: int, shape: tuple[int, ...] = shape, frames: int = frames) -> Item:
                item = {first: random(*shape)}
                for name in masks:
                    item[name] = torch.ones(1, frames, dtype=torch.long)
                    item[name][:, frames - 8 * n :] *= 0 if n else 1
                return item

            yield Style("audio", sound)
            if masks:
                yield Style("audio", lambda n, shape=shape: {first: random(*shape)})


def placeholder(config: PretrainedConfig, modality: str) -> int | None:
    """Return the id of the token that features replace."""
    parts = [config, getattr(config, "text_config", None)]
    for name in _PLACEHOLDERS[modality]:
        for part in parts:
            if isinstance(value := getattr(part, name, None), int):
                return value
    return None


def item_tokens(model: nn.Module, item: Item, width: int, ids: torch.Tensor) -> int | None:
    """Return the number of tokens of an item as the model's call returns it, or None."""
    try:
        calls = calls_of(model, {"input_ids": ids, **item})
    except ProbeError:
        return None
    for called in calls:
        output = called.output
        if output is None:
            continue
        for value in (getattr(output, "pooler_output", None), output):
            tensors = [t for t in _tensors(value) if t.shape[-1] == width]
            if tensors:
                return sum(t.numel() for t in tensors) // width
    return None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for one in value for t in _tensors(one)]
    first = getattr(value, "last_hidden_state", None)
    return [first] if isinstance(first, torch.Tensor) else []


# Items of each row of a microbatch, by index of their size, with text around them.
MICROBATCHES = ([[0], [1]], [[], []], [[], [1, 0]])


def batches(
    model: nn.Module, config: PretrainedConfig, kinds: Sequence[Style], vocabulary: int, width: int
) -> list[dict[str, torch.Tensor]]:
    """Return three microbatches: one item per row, text only, and two items in one of two rows.

    Text only is left out if the class does not accept it. With several kinds, an item of each kind
    takes the place of one item.

    Raises:
        ValueError: the model computes no features of an item.
    """
    names = set(inspect.signature(type(model).forward).parameters)
    hint = _hint(model)
    generator = torch.Generator().manual_seed(9)
    special = {v for v in _token_ids(config) if v < vocabulary}
    usual = [n for n in range(3, vocabulary) if n not in special]

    def words(count: int) -> list[int]:
        return [usual[int(n)] for n in torch.randint(len(usual), (count,), generator=generator)]

    items = {style: [style.make(n) for n in range(2)] for style in kinds}
    ids = torch.tensor([words(6)])
    tokens = {style: hint.token or placeholder(config, style.modality) for style in kinds}
    counts: dict[Style, list[int]] = {}
    for style, token in tokens.items():
        if token is None and len(kinds) > 1:
            raise ValueError(f"no placeholder token of {style.modality} is known")
        counts[style] = [
            hint.tokens[n] if hint.tokens else 0 if token is None
            else item_tokens(model, style.collate([[item]]), width, ids) or 0
            for n, item in enumerate(items[style])
        ]
        if token is not None and not all(counts[style]):
            raise ValueError("no features of an item were seen")
    found = []
    parameters = inspect.signature(type(model).forward).parameters.items()
    needed = hint.always or any(
        p.default is p.empty for name, p in parameters if "pixel" in name or "features" in name
    )
    for rows in MICROBATCHES:
        if needed and not all(rows):
            continue
        texts = []
        for row in rows:
            text = words(4)
            for n, (style, token) in itertools.product(row, tokens.items()):
                text += [token] * counts[style][n] + words(3)
            texts.append(text + words(2))
        length = max(map(len, texts))
        ids = torch.tensor([text + [usual[0]] * (length - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(t) + [0] * (length - len(t)) for t in texts])
        own = torch.zeros_like(ids, dtype=torch.bool)
        types = torch.zeros_like(ids)
        for style, token in tokens.items():
            there = (ids == token) if token is not None else torch.zeros_like(own)
            own, types = own | there, types + there.long() * _KINDS.get(style.modality, 0)
        batch = {
            "input_ids": ids, "attention_mask": mask,
            "labels": ids.masked_fill((mask == 0) | own, -100),
        }
        if "mm_token_type_ids" in names:
            batch["mm_token_type_ids"] = types
        if "token_type_ids" in names:
            batch["token_type_ids"] = own.long()
        for style in kinds:
            chosen = [[items[style][n] for n in row] for row in rows]
            if any(rows) or style.modality == "text":
                there = style.collate(chosen) if any(rows) else {}
                batch |= there | (hint.more(ids, own, there) if hint.more is not None else {})
        found.append(batch)
    return found


def _token_ids(config: PretrainedConfig) -> set[int]:
    found = set()
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            found |= _token_ids(value)
        elif ("token_id" in name or "token_index" in name) and isinstance(value, int):
            found.add(value)
    return found
