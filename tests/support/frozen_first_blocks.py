"""Models whose encoders train adapters in their last blocks alone."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PretrainedConfig

import raymm
from raymm.actors.adapters.lora_config import LoraConfig

TINY: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
}
PICTURES = {**TINY, "image_size": 8, "patch_size": 4}
LAST = LoraConfig(r=2, targets=r".*layers?\.[23]\..*(q_proj|query)")


def model_of(
    config: PretrainedConfig, lora: LoraConfig | None = LAST, **options: Any
) -> raymm.MultimodalModule:
    """Return an encoder of four blocks, of which adapters train the last two, with a projector and
    a language model."""
    encoder = raymm.ModalityModule(config, "mlp", lora=lora, **options)
    return raymm.MultimodalModule({"vision": encoder}, LlamaConfig(vocab_size=32, **TINY))
