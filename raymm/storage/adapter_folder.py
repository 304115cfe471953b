"""Adapters in folders that ``peft`` loads (its public format: JSON and safetensors)."""

from __future__ import annotations

import json
import math
from pathlib import Path

from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from raymm.actors.adapters.lora import MAGNITUDE, AdaptedLayer, is_adapter
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.weights.hub_folder import is_hub_id, split_id

# Prefix of a model's layers in ``peft``.
_PREFIX = "base_model.model."


def save_adapters(module: nn.Module, folder: Path, base: str | None, causal: bool) -> None:
    """Write the adapters of a module.

    Args:
        base: folder or hub id of the module without adapters; None if users pass it to ``peft``.
        causal: True for a causal language model, which ``peft`` wraps as such.
    """
    layers = {name: m for name, m in module.named_modules() if isinstance(m, AdaptedLayer)}
    lora = next(iter(layers.values())).lora
    adapters = {name: layer.lora for name, layer in layers.items()}
    # peft has one use_rslora for all layers, so the alphas of layers with the other scaling change.
    alphas = {name: _alpha(adapter, lora.use_rslora) for name, adapter in adapters.items()}
    revision = None
    if base is not None and is_hub_id(base):
        base, revision = split_id(base)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM" if causal else None,
        "base_model_name_or_path": base, "revision": revision, "inference_mode": True, "r": lora.r,
        "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": list(layers),
        "rank_pattern": {n: adapter.r for n, adapter in adapters.items() if adapter.r != lora.r},
        "alpha_pattern": {n: alpha for n, alpha in alphas.items() if alpha != lora.alpha},
        "use_dora": lora.dora, "use_rslora": lora.use_rslora, "bias": "none",
        "fan_in_fan_out": any(isinstance(layer, Conv1D) for layer in layers.values()),
    }
    tensors = {
        f"{_PREFIX}{name}" + ("" if name.endswith(MAGNITUDE) else ".weight"):
        parameter.detach().contiguous()
        for name, parameter in module.named_parameters() if is_adapter(name)
    }
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "adapter_model.safetensors")


def _alpha(lora: LoraConfig, use_rslora: bool) -> float:
    """Return the alpha with which peft scales like ``lora``, given a ``use_rslora``."""
    if lora.use_rslora == use_rslora:
        return lora.alpha
    return lora.scaling * (math.sqrt(lora.r) if use_rslora else lora.r)
