"""Tiny configurations, derived from the defaults of a configuration class.

Sizes shrink by what their names say they are, all sizes of a kind by one factor, so that products
and ratios between them hold: head counts by one factor, head widths by another, widths by both.
Lists with an entry per layer keep the entries of a few layers, one of every kind among them. Values
that are not sizes (dropout, layer drop, activations, flags) keep their defaults.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PretrainedConfig

from benchmarks.shared.family_exceptions import AWKWARD

DEPTH = 4
WIDTH, HEADS, HEAD_WIDTH = 64, 4, 16
NARROWEST, LEVEL_DEPTH, FILTERS = 32, 2, 8  # of the levels of a pyramid
VOCABULARY = 256
IMAGE_SIZE, VIDEO_FRAMES = 32, 4
EXPERTS, EXPERTS_PER_TOKEN = 4, 2
POSITIONS, QUERIES = 512, 8

_DEPTHS = re.compile(
    r"^(num_(hidden_|encoder_|decoder_)?(layers|blocks)|n_layers?|(en|de)coder_layers|depth"
    r"|num_(encoder|decoder)_(layers|blocks)|.*_num_hidden_layers)$"
)
_HEADS = re.compile(
    r"(^|_)(n|num|attention|kv|query)?_?(heads?|query_groups)(_per_layer)?$|_heads_"
)
_HEAD_WIDTHS = re.compile(
    r"head_?dim|head_size|(^|_)d_head|dim_head|kv_channels|rotary_dim|d_kv|d_rel$"
)
_WIDTHS = re.compile(
    r"hidden_size|hidden_dim|intermediate_size|d_model|n_embd|n_inner|(^|_)ffn|d_ff|dff|dim_ff"
    r"|embed_dim|emb_dim|embedding_dim|_rank$|lru_width|d_ssm|d_inner|feed_forward_size"
    r"|embedding_size|proj_dim|mlp_dim|(^|_)dim$|pos_embds_dim|lowrank|mid_dim|dim_model_base"
    r"|projection_size|projection_dim|hidden_sizes|encoder_hidden|conv_dim|out_features_dim"
    r"|_channels$|^attention_hidden_size$|expand_dim|(^|_)width$|feature_size|bottleneck"
    r"|adapter_input_size"
)
_NOT_WIDTHS = re.compile(
    r"vocab|image_size|patch_size|num_channels|in_channels|in_chans|input_channels|window|kernel"
    r"|multiplier|ratio|pos_emb_|conv1d_width|filter_width|hidden_size_per_layer_input_vocab|num_hidden"
)
_EXPERTS = re.compile(
    r"num_(local_|moe_)?experts$|n_routed_experts|moe_num_experts|zero_expert_num"
)
_EXPERTS_PER_TOKEN = re.compile(r"experts_per_tok|moe_top_?k|^moe_k$|^top_k_experts$")
_HEAD_GROUPS = re.compile(r"(^|_)n_?groups$|^o_groups$")
_FILTERS = re.compile(r"^(num|n)_filters$")  # first level; later levels have twice as many
_GROUPS = re.compile(r"^(n_group|topk_group|num_expert_group)$")
_TOKEN_IDS = re.compile(r"token_id$|token_index$|_token_ids$|mask_index|unk_index")
_POSITIONS = re.compile(
    r"max_position_embeddings|n_positions|max_(seq|source|target)_.*|n_ctx|context_length|max_seq_len"
)

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}

_INDEXER = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}  # fmt: skip

_LEVEL_DEPTHS = re.compile(r"^(depths|num_block_repeats|layer_depths)$")
_LISTS = ("depths", "hidden_sizes", "stage_names")


class UnmakeableError(ValueError):
    """Error for a class without any valid tiny configuration."""


@dataclass(frozen=True)
class Shrink:
    """Shrinking rules for sizes.

    Attributes:
        depth: layers of every list of blocks.
        widths: True to shrink widths and heads.
        pyramids: True to shrink the levels of a pyramid that has no main width.
        image: side of images, in pixels.
        multiple: divisor of all widths.
        flags: values for all fields with the name.
        common: True to shrink all parts of a configuration by the same factors.
    """

    depth: int = DEPTH
    widths: bool = True
    pyramids: bool = True
    image: int | None = IMAGE_SIZE
    experts: bool = True
    common: bool = False
    multiple: int = 1
    flags: Mapping[str, Any] = field(default_factory=dict)


# Tried in this order until one runs.
SHRINKS = (
    Shrink(),
    Shrink(pyramids=False),
    Shrink(common=True),
    Shrink(multiple=16),
    Shrink(image=64),
    Shrink(image=64, multiple=16),
    Shrink(image=None),
    Shrink(widths=False),
    Shrink(widths=False, image=None),
    Shrink(widths=False, image=None, experts=False),
)


def tiny_configs(
    config_class: type[PretrainedConfig], flags: Mapping[str, Any],
    default: PretrainedConfig | None = None,
) -> Iterator[PretrainedConfig]:  # fmt: skip
    """Yield configurations of a class, the smallest first.

    Args:
        flags: values for all fields with the name.
        default: configuration to shrink; None for the class's own defaults.

    Raises:
        UnmakeableError: no configuration can be made.
    """
    default = default or default_config(config_class)
    made, errors = 0, []
    for shrink in SHRINKS:
        try:
            config = shrunk(default, replace(shrink, flags=flags))
            _set(config, AWKWARD.get(config_class.__name__, {}))
        except Exception as error:  # noqa: BLE001  a class's own checks raise any error
            errors.append(error)
            continue
        made += 1
        yield config
    if not made:
        raise UnmakeableError(f"{config_class.__name__}: {errors[0]}") from errors[0]


def _set(config: PretrainedConfig, changes: Mapping[str, Any]) -> None:
    for path, value in changes.items():
        *parts, name = path.split(".")
        setattr(functools.reduce(getattr, parts, config), name, value)


def default_config(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """Return the class's own defaults.

    Raises:
        UnmakeableError: the class has no valid defaults.
    """
    parts: dict[str, Any] = {}
    while True:
        try:
            return config_class(**{"text_config": dict(parts)} if parts else {})
        except Exception as error:
            # Some defaults violate the class's own rules; the error names the accepted value.
            asked = dict(re.findall(r"(\w+) must be (0|False|True)\b", str(error)))
            if not asked.keys() - parts.keys():
                raise UnmakeableError(f"{config_class.__name__}(): {error}") from error
            parts |= {name: {"0": 0, "False": False, "True": True}[v] for name, v in asked.items()}


def shrunk(config: PretrainedConfig, shrink: Shrink) -> PretrainedConfig:
    """Return a smaller configuration of the same class, with its own checks and derived values."""
    parts = [config, *_parts(config)]
    factors = min((_factors(part) for part in parts if _main_width(part)), default=_Factors(1, 1))
    return _remade(config, shrink, {} if shrink.common else _cross_widths(parts), factors)


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    direct = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    return direct + [inner for part in direct for inner in _parts(part)]


def _remade(
    config: PretrainedConfig, shrink: Shrink, cross: Mapping[int, int], common: _Factors
) -> PretrainedConfig:
    values = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    factors = common if shrink.common else _factors(config)
    if shrink.pyramids and factors.width == 1:
        factors = _pyramid_factors(values)
    smaller = _smaller(config, values, shrink, cross, factors)
    for name, value in values.items():
        if isinstance(value, PretrainedConfig):
            smaller[name] = _remade(value, shrink, cross, common)
    kept = {
        name: copy.deepcopy(value)
        for name, value in values.items()
        if name
        not in (
            "transformers_version",
            "architectures",
            "torch_dtype",
            "dtype",
            "ignore_keys_at_rope_validation",
        )
    }
    kept.update(smaller)
    kept = {n: list(v) if isinstance(v, tuple) and n in _LISTS else v for n, v in kept.items()}
    kept.update({name: value for name, value in shrink.flags.items() if name in kept})
    made = type(config)(**kept)
    chosen = getattr(config, "out_indices", None) or []
    if len(chosen) > 1 and "num_hidden_layers" not in values and hasattr(made, "stage_names"):
        made.out_indices = list(chosen)  # a pyramid that returns more than its last level
    return made


@dataclass(frozen=True, order=True)
class _Factors:
    """Divisors of head counts and head widths."""

    heads: int
    head_width: int

    @property
    def width(self) -> int:
        return self.heads * self.head_width


def _first(config: PretrainedConfig, *names: str) -> int | None:
    known = vars(config)
    for name in names:
        value = known.get(config.attribute_map.get(name, name), known.get(name))
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _main_width(config: PretrainedConfig) -> int | None:
    return _first(
        config,
        "hidden_size",
        "d_model",
        "n_embd",
        "embed_dim",
        "emb_dim",
        "dim",
        "embedding_dim",
        "width",
    )


def _factors(config: PretrainedConfig) -> _Factors:
    width = _main_width(config)
    heads = _first(
        config,
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "attention_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "linear_num_heads",
    )
    head = _first(config, "head_dim", "d_kv", "qk_nope_head_dim", "attention_head_size")
    if width is None:
        return _Factors(1, 1)
    levels = vars(config).get("num_heads")  # of a pyramid, narrowest first
    if isinstance(levels, list | tuple) and isinstance(
        narrowest := _first(config, "embed_dim"), int
    ):
        return _Factors(1, _divisor(narrowest // levels[0], 8))
    if heads is None:
        return _Factors(1, _divisor(width, WIDTH))
    head = head or max(width // heads, 1)
    by_heads = _divisor(heads, HEADS)
    return _Factors(by_heads, _divisor(width // by_heads or 1, WIDTH, also=head))


def _pyramid_factors(values: Mapping[str, Any]) -> _Factors:
    """Return the factors of a configuration without a main width.

    The narrowest level keeps :data:`NARROWEST`.
    """
    widths = [
        item
        for name, value in values.items()
        if _WIDTHS.search(name) and not _NOT_WIDTHS.search(name)
        for item in (value if isinstance(value, list | tuple) else [value])
        if type(item) is int and item >= NARROWEST
    ]
    return _Factors(1, _divisor(min(widths, default=1), NARROWEST))


def _divisor(size: int, target: int, also: int = 0) -> int:
    """Return the largest divisor that leaves at least ``target``, and 8 of ``also``.

    ``also`` stays a multiple of four, as sections of rotary positions are pairs in two dimensions.
    """
    best = 1
    for divisor in range(1, size // target + 1):
        left, rest = divmod(also, divisor)
        if size % divisor == 0 and rest == 0 and (
            not also or (left >= 8 and left % 4 == also % 4)
        ):
            best = divisor
    return best


def _cross_widths(parts: list[PretrainedConfig]) -> dict[int, int]:
    """Return the new main width of each part; parts refer to each other's widths."""
    known: dict[int, int] = {}
    for part in parts:
        width = _main_width(part)
        if width is not None:
            known.setdefault(width, width // _factors(part).width)
    return known


def _smaller(
    config: PretrainedConfig,
    values: Mapping[str, Any],
    shrink: Shrink,
    cross: Mapping[int, int],
    factors: _Factors,
) -> dict[str, Any]:
    own = _main_width(config)
    cross = {width: new for width, new in cross.items() if width != own}
    depths = {n: v for n, v in values.items() if _DEPTHS.search(n) and isinstance(v, int) and v > 0}
    depth = depths.get("num_hidden_layers") or next(iter(depths.values()), None)
    kept = _kept_layers(values, depth, shrink.depth) if depth else []
    smaller: dict[str, Any] = {
        name: min(len(kept) or shrink.depth, v) for name, v in depths.items()
    }
    for name, value in values.items():
        if value is None and _EXPERTS_PER_TOKEN.search(name):
            smaller[name] = EXPERTS_PER_TOKEN
        if value is None and _EXPERTS.search(name):
            smaller[name] = EXPERTS
        if value is None and re.search("n(um)?_shared_experts", name):
            smaller[name] = 1
        if name == "rope_parameters" and value == {} and values.get("layer_types"):
            smaller[name] = {kind: dict(_ROPE) for kind in values["layer_types"]}
        if value is None and name == "default_language" and values.get("languages"):
            smaller[name] = values["languages"][0]
        if value is None and name in _INDEXER:
            smaller[name] = _INDEXER[name]
        if name.endswith("_coefficient") and shrink.widths and isinstance(value, float):
            smaller[name] = min(value, 0.5)  # EfficientNet's sizes
        if name == "axial_pos_shape":
            smaller[name] = [3, 4]  # number of token types
        if value is None and name == "num_key_value_heads":
            smaller[name] = HEADS // 2
        if value is None and name == "head_dim" and shrink.widths:
            smaller[name] = HEAD_WIDTH
        if value is None and name == "layer_types" and depth:
            smaller[name] = ["full_attention"] * len(kept)
        if name in smaller or isinstance(value, bool) or value is None:
            continue
        new = _smaller_value(name, value, factors, shrink, cross, depth, kept)
        if new is not None:
            smaller[name] = new
    return smaller


def _smaller_value(
    name: str,
    value: Any,
    factors: _Factors,
    shrink: Shrink,
    cross: Mapping[int, int],
    depth: int | None,
    kept: list[int],
) -> Any:
    if shrink.pyramids and _LEVEL_DEPTHS.search(name) and isinstance(value, list | tuple):
        return [min(item, LEVEL_DEPTH) if isinstance(item, int) else item for item in value]
    if isinstance(value, list | tuple) and depth and len(value) == depth:
        picked = [value[layer] for layer in kept]
        if _is_indices(name, value, depth):
            return list(range(len(kept)))
        if value and isinstance(value[0], int) and not isinstance(value[0], bool):
            shrunk_items = [
                _smaller_value(name, item, factors, shrink, cross, None, kept) for item in picked
            ]
            picked = [
                old if new is None else new for old, new in zip(picked, shrunk_items, strict=True)
            ]
        return type(value)(picked)
    if depth and _is_indices(name, value, depth):
        found = sorted({kept.index(layer) for layer in value if layer in kept})
        return type(value)(found or sorted({item * len(kept) // depth for item in value}))
    if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
        new = [_smaller_value(name, item, factors, shrink, cross, None, kept) for item in value]
        if any(one is not None for one in new):
            return type(value)(o if n is None else n for o, n in zip(value, new, strict=True))
        return None
    if name == "per_layer_config" and depth:
        return {
            f"{kept.index(int(layer)):02d}": {
                n: v if (new := _smaller_value(n, v, factors, shrink, cross, None, kept)) is None
                else new for n, v in changed.items()
            }
            for layer, changed in dict(value).items() if int(layer) in kept
        }  # fmt: skip
    if name == "rope_parameters" and shrink.widths:
        return _smaller_rope(value, factors)
    if type(value) is not int:
        return None
    if re.search(r"vocab_size(_|$)|encoder_hash_byte_group_vocab|ngram_vocab_size_base", name):
        return min(value, VOCABULARY)
    if _TOKEN_IDS.search(name):
        return value if value < VOCABULARY else 100 + value % 100
    if re.search(r"(^|_)(?<!tokenizer_)chunk_size$|^scan_chunk", name):
        return min(value, 8) if value else None
    if _POSITIONS.search(name):
        return min(value, POSITIONS)
    if name in ("image_size", "crop_size") and shrink.image:
        return min(value, shrink.image)
    if shrink.image and re.search(r"^num_frames$|^frames_per_clip$", name):
        return min(value, VIDEO_FRAMES)
    if shrink.pyramids and name == "num_queries":
        return min(value, QUERIES)
    if shrink.pyramids and _FILTERS.search(name):
        return min(value, FILTERS)
    if shrink.experts and _EXPERTS.search(name) and value > EXPERTS:
        return EXPERTS
    if shrink.experts and _EXPERTS_PER_TOKEN.search(name) and value > EXPERTS_PER_TOKEN:
        return EXPERTS_PER_TOKEN
    if shrink.experts and _GROUPS.search(name):
        return 1
    if name == "num_kv_shared_layers" and depth:
        return sum(layer >= depth - value for layer in kept) if value < depth else 0
    if re.search(r"first_k_dense_replace|num_dense_layers|(start|end)_index$", name) and depth:
        return min(value, len(kept) - 1)
    if not shrink.widths:
        return None
    if _HEADS.search(name) or _HEAD_GROUPS.search(name):
        return max(1, value // factors.heads)
    if _HEAD_WIDTHS.search(name):
        return max(2, value // factors.head_width) if value > 8 else None
    if _WIDTHS.search(name) and not _NOT_WIDTHS.search(name) and value >= 16:
        if value in cross:
            return cross[value]
        if re.search("intermediate|ffn|feed_forward|mlp_dim|dff", name):
            return max(16, value // factors.width // 16 * 16)  # nothing else depends on this width
        small = max(8, value // factors.width)
        return -(-small // shrink.multiple) * shrink.multiple
    return None


def _smaller_rope(value: Any, factors: _Factors) -> Any:
    """Shrink sections of a head's width with the head."""
    if not isinstance(value, dict):
        return value
    return {
        name: [max(1, one // factors.head_width) for one in item]
        if name == "mrope_section"
        else _smaller_rope(item, factors)
        for name, item in value.items()
    }


def _is_indices(name: str, value: Any, depth: int) -> bool:
    """Return True if a list contains layer indices."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(type(one) is int and 0 <= one <= depth for one in value)
        and len(set(value)) == len(value)
        and bool(re.search(r"layer|idx|index|indices", name))
        and not re.search(r"^no_rope_layers$|token", name)
    )


def _kept_layers(values: Mapping[str, Any], depth: int, wanted: int) -> list[int]:
    """Return the layers to keep: one of every kind, then the first ones."""
    lists = [
        v
        for v in values.values()
        if isinstance(v, list | tuple)
        and len(v) == depth
        and all(isinstance(one, str | int | bool) for one in v)
        and 1 < len(set(v)) <= max(3, depth // 2)
    ]
    if shared := values.get("num_kv_shared_layers"):
        lists.append([layer >= depth - shared for layer in range(depth)])
    first = {tuple(v[layer] for v in lists): layer for layer in reversed(range(depth))}
    kept = sorted(first.values()) if lists else []
    kept += [layer for layer in range(depth) if layer not in kept][: max(wanted - len(kept), 0)]
    return sorted(kept)
