"""Whisper's encoder out of a CTranslate2 file, for a window shorter than 30 s."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from examples.alignment.ctranslate2_file import read_tensors

_Names = list[tuple[str, str]]  # (CTranslate2's name, WhisperEncoder's name)


def _linear(old: str, new: str) -> _Names:
    return [(f"{old}/weight", f"{new}.weight"), (f"{old}/bias", f"{new}.bias")]


def _layer_norm(old: str, new: str) -> _Names:
    return [(f"{old}/gamma", f"{new}.weight"), (f"{old}/beta", f"{new}.bias")]


def _layer(old: str, new: str) -> _Names:
    return [
        *_layer_norm(f"{old}/self_attention/layer_norm", f"{new}.self_attn_layer_norm"),
        *_linear(f"{old}/self_attention/linear_0", f"{new}.self_attn.qkv"),
        *_linear(f"{old}/self_attention/linear_1", f"{new}.self_attn.out_proj"),
        *_layer_norm(f"{old}/ffn/layer_norm", f"{new}.final_layer_norm"),
        *_linear(f"{old}/ffn/linear_0", f"{new}.fc1"),
        *_linear(f"{old}/ffn/linear_1", f"{new}.fc2"),
    ]


def encoder_state_dict(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``WhisperEncoder``'s fp32 state dict from CTranslate2's tensors, all positions.

    CTranslate2 fuses Q, K and V into one matrix; Whisper's K has no bias, so that part of the
    fused bias must be zero. Raises ``ValueError`` if it is not, or if a tensor is missing.
    """
    layers = len(
        {n.split("/")[1] for n in tensors if n.startswith("encoder/layer_")} - {"layer_norm"}
    )
    names = [("encoder/position_encodings/encodings", "embed_positions.weight")]
    names += _linear("encoder/conv1", "conv1") + _linear("encoder/conv2", "conv2")
    names += _layer_norm("encoder/layer_norm", "layer_norm")
    for i in range(layers):
        names += _layer(f"encoder/layer_{i}", f"layers.{i}")
    missing = [old for old, _ in names if old not in tensors]
    if missing or not layers:
        raise ValueError(f"no Whisper encoder: {layers} layers, missing tensors {missing[:3]}")

    state = {new: tensors[old].float() for old, new in names}
    for i in range(layers):
        attention = f"layers.{i}.self_attn"
        for part in ("weight", "bias"):
            fused = state.pop(f"{attention}.qkv.{part}").chunk(3)
            for name, tensor in zip("qkv", fused, strict=True):
                state[f"{attention}.{name}_proj.{part}"] = tensor.clone()
        if state.pop(f"{attention}.k_proj.bias").any():
            raise ValueError(
                f"encoder/layer_{i}: the key projection has a bias; Whisper's has none"
            )
    return state


def load_encoder(path: str | Path, positions: int) -> WhisperEncoder:
    """Return the Whisper encoder in the CTranslate2 file ``path``, fp32, in eval mode.

    ``positions`` is the window in output frames of 20 ms, up to the file's 1500: it accepts
    log-mel input (B, mels, 2 * positions) and gives (B, positions, width). Frame positions
    are absolute, so a shorter window is the same function on the clip's first frames, except
    that attention no longer sees the rest of the padding.

    Raises ``ValueError`` if the file is not a Whisper model or has fewer positions.
    """
    tensors = read_tensors(path, "WhisperSpec")
    state = encoder_state_dict(tensors)
    available, width = state["embed_positions.weight"].shape
    if not 1 <= positions <= available:
        raise ValueError(f"positions is {positions}, accepted are 1 to {available}")
    state["embed_positions.weight"] = state["embed_positions.weight"][:positions].clone()
    config = WhisperConfig(
        num_mel_bins=state["conv1.weight"].shape[1],
        d_model=width,
        encoder_layers=1 + max(int(n.split(".")[1]) for n in state if n.startswith("layers.")),
        encoder_attention_heads=int(tensors["encoder/num_heads"]),
        encoder_ffn_dim=state["layers.0.fc1.weight"].shape[0],
        decoder_layers=4,
        decoder_attention_heads=6,
        decoder_ffn_dim=1536,
        vocab_size=51864,
        max_source_positions=positions,
    )
    with torch.device("meta"):
        encoder = WhisperEncoder(config)
    encoder.load_state_dict(state, assign=True)
    return encoder.eval()
