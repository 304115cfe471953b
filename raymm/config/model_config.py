"""Hugging Face configs from configuration values, with a check of unknown keys."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig

from raymm.errors import ConfigError

# Minimum similarity, from 0 to 1, of a known key that is suggested for an unknown one.
_ALIKE = 0.7


def model_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """Return the config of values with a ``model_type``.

    Raises:
        ConfigError: unknown type, a key that the config class does not have (transformers would
            store and ignore it), or a value that the class refuses.
    """
    values = dict(values)
    kind = values.pop("model_type", None)
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        suggestion = _like(kind, transformers.CONFIG_MAPPING)
        raise ConfigError(
            f"config.model_type is {kind!r}; expected one that transformers knows, such as "
            f"{suggestion or 'llama or siglip_vision_model'}"
        )
    try:
        config = transformers.CONFIG_MAPPING[kind](**values)
    except Exception as error:  # each config class has its own checks and error types
        raise ConfigError(f"config of a {kind!r} model: {error}") from None
    _check_keys(config, values, "config", _default(type(config)))
    return config


def _check_keys(
    config: PretrainedConfig, values: Mapping[str, Any], where: str, default: Mapping[str, Any]
) -> None:
    accepted = _known_keys(type(config)) | set(default)
    for key, value in values.items():
        # A class consumes the keys that it knows, or stores them under an existing name.
        if (
            key in accepted or key not in vars(config) or key.startswith("_")
            or _code_reads(type(config), key)
        ):
            inner = vars(config).get(key)
            if isinstance(inner, PretrainedConfig) and isinstance(value, Mapping):
                inner_values = {k: v for k, v in value.items() if k != "model_type"}
                defaults = default.get(key)
                defaults = defaults if isinstance(defaults, dict) else _default(type(inner))
                _check_keys(inner, inner_values, f"{where}.{key}", defaults)
            continue
        hint = _like(key, accepted)
        raise ConfigError(
            f"{where}.{key}: {type(config).__name__} has no such key"
            + (f"; did you mean {hint}?" if hint else f"; accepted: {', '.join(sorted(accepted))}")
        )


def _like(key: Any, accepted: Iterable[str]) -> str:
    return " or ".join(difflib.get_close_matches(str(key), sorted(accepted), 2, _ALIKE))


@cache
def _default(kind: type[PretrainedConfig]) -> Mapping[str, Any]:
    """Return the default values of a config class, with those of nested configs."""
    try:
        values = kind().to_dict()
    except Exception:  # some classes need arguments
        return {}
    return {key: value for key, value in values.items() if not key.startswith("_")}


@cache
def _known_keys(kind: type[PretrainedConfig]) -> frozenset[str]:
    """Return fields, their aliases, and properties."""
    names = {field.name for field in fields(kind)} | set(kind.attribute_map)
    properties = {n for n in dir(kind) if isinstance(getattr(kind, n, None), property)}
    return frozenset(n for n in names | properties if not n.startswith("_"))


def _code_reads(kind: type[PretrainedConfig], key: str) -> bool:
    """Return True if the code of the model family reads a key that the class does not declare."""
    pattern = re.compile(
        rf"config\.{re.escape(key)}\b|(getattr|kwargs\.(get|pop))\([^()\n]*[\"']{re.escape(key)}[\"']"
    )
    return any(pattern.search(text) for text in _code(kind))


@cache
def _code(kind: type[PretrainedConfig]) -> tuple[str, ...]:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    files = Path(file).parent.glob("*.py") if file else ()
    return tuple(
        path.read_text(errors="replace") for path in sorted(files)
        if path.name.startswith(("modeling_", "configuration_"))
    )
