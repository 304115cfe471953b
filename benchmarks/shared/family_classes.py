"""Classes of the installed transformers, found in its own registries."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import transformers.models
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

LANGUAGE, ENCODER = "language model", "encoder"
# First forward parameters of classes that take images, videos or audio.
ITEMS = (
    "pixel_values", "pixel_values_videos", "input_values", "input_features", "audio_mel",
    "image", "flattened_patches",
)  # fmt: skip
# Towers of larger models may take patches, under these names.
_PATCHES = ("hidden_states", "patch_input", "patch_embeds")
# Classes with one of these parameters are not standalone encoders.
_OTHER_INPUTS = frozenset({
    "input_ids", "inputs_embeds", "labels", "encoder_hidden_states", "bbox", "query_embeds",
    "qformer_input_ids", "input_points", "inference_session", "input_boxes", "mask_labels",
})  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Class to cut.

    Attributes:
        kind: :data:`LANGUAGE` or :data:`ENCODER`.
        model_class, config_class: as transformers pairs them.
    """

    kind: str
    model_class: type[PreTrainedModel]
    config_class: type[PretrainedConfig]

    @property
    def name(self) -> str:
        return self.model_class.__name__


def language_models() -> list[Family]:
    """Return every class of ``MODEL_FOR_CAUSAL_LM_MAPPING``, once."""
    found: dict[type, Family] = {}
    for config, model in _pairs(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        # Some configurations with several parts map to the class of their text part.
        found[model] = Family(LANGUAGE, model, model.config_class or config)
    return sorted(found.values(), key=lambda family: family.name)


def encoders() -> list[Family]:
    """Return every class that computes features of images, videos or audio alone.

    The candidates are the classes of ``AutoModel`` and ``AutoBackbone``, the towers of models of
    several modalities (classes whose configuration is part of another one), and the encoders of
    encoder-decoder models of images or audio. Parameter names of the forward decide.
    """
    parts = {c for config in _all_configs() for c in _part_classes(config)}
    found: dict[type, Family] = {}
    registries = modeling_auto.MODEL_MAPPING, modeling_auto.MODEL_FOR_BACKBONE_MAPPING
    pairs = [pair for registry in registries for pair in _pairs(registry)]
    for config, model in pairs:
        if _encodes(model, config in parts):
            found.setdefault(model, Family(ENCODER, model, model.config_class or config))
        elif _parameters(model)[:1] and _parameters(model)[0] in ITEMS:
            inner = _encoder_class(model, config)
            if inner is not None and _encodes(inner, False):
                found.setdefault(inner, Family(ENCODER, inner, inner.config_class or config))
    registered = {family.config_class for family in found.values()}
    for model in _all_models():
        if model.config_class in parts - registered and _encodes(model, True):
            found.setdefault(model, Family(ENCODER, model, model.config_class))
    return sorted(found.values(), key=lambda family: family.name)


def named(kind: str, name: str) -> Family:
    """Return a class by name without enumerating the others."""
    model = getattr(transformers, name, None)
    if model is None:  # the encoder of an encoder-decoder
        (model,) = [one for one in _all_models() if one.__name__ == name]
    return Family(kind, model, model.config_class)


def _pairs(registry: Any) -> Iterator[tuple[type[PretrainedConfig], type[PreTrainedModel]]]:
    for config in registry.keys():  # noqa: SIM118  iteration is not supported
        try:
            models = registry[config]
        except (ImportError, ValueError):  # missing package or class
            continue
        for model in models if isinstance(models, list | tuple) else (models,):
            if isinstance(model, type) and issubclass(model, PreTrainedModel):
                yield config, model


def _all_configs() -> Iterable[type[PretrainedConfig]]:
    return {config for _, config in CONFIG_MAPPING.items()}


def _part_classes(config: type[PretrainedConfig]) -> list[type]:
    parts: Any = config.sub_configs or {}
    return [part for part in parts.values() if isinstance(part, type)]


@functools.cache
def _all_models() -> tuple[type[PreTrainedModel], ...]:
    found = []
    for package in pkgutil.iter_modules(transformers.models.__path__):
        folder = importlib.import_module(f"transformers.models.{package.name}")
        for file in pkgutil.iter_modules(getattr(folder, "__path__", [])):
            if not file.name.startswith("modeling_"):
                continue
            try:
                module = importlib.import_module(f"{folder.__name__}.{file.name}")
            except ImportError:  # missing package
                continue
            found += [
                one
                for one in vars(module).values()
                if inspect.isclass(one)
                and issubclass(one, PreTrainedModel)
                and one.__module__ == module.__name__
                and "forward" in vars(one)
            ]
    return tuple(found)


def _parameters(model: type[PreTrainedModel]) -> list[str]:
    return [name for name in inspect.signature(model.forward).parameters if name != "self"]


def _encodes(model: type[PreTrainedModel], is_part: bool) -> bool:
    names = _parameters(model)
    starts = (*ITEMS, *_PATCHES) if is_part else ITEMS
    return (
        bool(names)
        and names[0] in starts
        and model.config_class is not None
        and not _OTHER_INPUTS & set(names)
        and not any(name.startswith("decoder_") for name in names)
    )


def _encoder_class(
    model: type[PreTrainedModel], config: type[PretrainedConfig]
) -> type[PreTrainedModel] | None:
    """Return the class of an encoder-decoder model's encoder."""
    try:
        with torch.device("meta"):
            inner = model._from_config(config()).get_encoder()
    except Exception:  # noqa: BLE001  inconsistent defaults: not a standalone encoder
        return None
    known = type(inner)
    return known if issubclass(known, PreTrainedModel) and known is not model else None
