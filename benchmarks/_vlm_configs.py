"""Adjustments that make the parts of tiny vision-language configurations fit each other."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from benchmarks._family_configs import _parts, default_config
from benchmarks._family_exceptions import AWKWARD

_TOKENS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
_OUTPUTS = ("out_hidden_size", "output_dim", "projection_dim", "text_hidden_size")
_AROUND = (
    "vision_start_token_id", "vision_end_token_id", "audio_start_token_id", "audio_end_token_id",
)  # fmt: skip


def complete_default(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """Return a class's defaults; parts without one get those of the part's class."""
    config = default_config(config_class)
    kinds: Any = config_class.sub_configs or {}
    missing = {
        name: part for name, part in kinds.items()
        if isinstance(part, type) and issubclass(part, PretrainedConfig)
        and getattr(config, name, 0) is None
    }  # fmt: skip
    if not missing:
        return config
    try:
        parts: dict[str, Any] = {name: default_config(part) for name, part in missing.items()}
        return config_class(**parts)
    except Exception:  # noqa: BLE001  a class's own checks raise any error
        return config


def fit_parts(config: PretrainedConfig) -> None:
    """Make the parts of a configuration consistent.

    Disable random numbers, set placeholder ids, make tower outputs as wide as the text model's
    input, and as many tokens as a small image has patches.
    """
    every = (config, *_parts(config))
    text = getattr(config, "text_config", None) or config
    wide = getattr(text, "hidden_size", None)
    for part in every:
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and "drop" in name:
                setattr(part, name, 0.0)
            if name in _TOKENS and value is None:
                setattr(part, name, 99 + _TOKENS.index(name))
            if name in _OUTPUTS and part is not text and isinstance(value, int) and wide:
                setattr(part, name, wide)
        for name, value in AWKWARD.get(type(part).__name__, {}).items():
            if "." not in name:
                setattr(part, name, value)
    for name in _AROUND:  # set in published configurations, but not by these classes' defaults
        if hasattr(config, "audio_config") and not hasattr(config, name):
            setattr(config, name, 90 + _AROUND.index(name))
    _fit_images(config)


def _fit_images(config: PretrainedConfig) -> None:
    vision = getattr(config, "vision_config", None)
    side, patch = _side(getattr(vision, "image_size", None)), _side(
        getattr(vision, "patch_size", None)
    )
    depth = getattr(vision, "num_hidden_layers", None)
    for part in (config, *_parts(config)):
        values: dict[str, Any] = vars(part)
        if side and values.get("image_grid_pinpoints"):
            part.image_grid_pinpoints = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
        if side and patch and isinstance(values.get("mm_tokens_per_image"), int):
            part.mm_tokens_per_image = (side // patch) ** 2
        for name, layers in list(values.items()):
            if "feature_layer" in name and isinstance(layers, list | tuple) and depth:
                if max(map(abs, layers)) > depth:
                    setattr(part, name, [-1 - n % depth for n in range(len(layers))])


def _side(value: Any) -> int | None:
    value = value[0] if isinstance(value, list | tuple) and value else value
    return value if isinstance(value, int) else None


def fit_sections(model: nn.Module, config: PretrainedConfig) -> None:
    """Set rotary sections that add up to the reduced head width.

    Their default is often defined in the class instead of the configuration.
    """
    for child in model.modules():
        sections, table = getattr(child, "mrope_section", 0), getattr(child, "inv_freq", None)
        if table is None or not isinstance(sections, list | tuple | None):
            continue
        wide, sections = table.shape[-1], sections or (1, 1, 1)
        if sum(sections) != wide:
            fitted = [max(1, wide * n // sum(sections)) for n in sections]
            fitted[0] += wide - sum(fitted)
            for part in (config, *_parts(config)):
                if isinstance(getattr(part, "rope_parameters", None), dict):
                    part.rope_parameters["mrope_section"] = fitted
