"""Tiny random models and batches for the parity suite.

Legend: ``B`` samples, ``T`` text tokens, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder

V = 97
IMAGE_TOKEN, AUDIO_TOKEN = 95, 96  # placeholders; ordinary tokens are below 90
IMAGE_SIZE = 16
MEL_BINS, AUDIO_FRAMES = 8, 24


def llama(tied: bool = True, layers: int = 3) -> hf.LlamaConfig:
    return hf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=V, tie_word_embeddings=tied,
    )


def qwen3() -> hf.Qwen3Config:
    return hf.Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=V, tie_word_embeddings=False,
    )


def gemma3() -> hf.Gemma3TextConfig:
    """Return a tied model with two kinds of layers; the window is shorter than the samples."""
    return hf.Gemma3TextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=V, sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attn_implementation="sdpa",
    )


def gpt2() -> hf.GPT2Config:
    return hf.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, vocab_size=V, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )


def opt() -> hf.OPTConfig:
    """Return a model with parameters around the blocks, because post-projection widths differ."""
    return hf.OPTConfig(
        hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=V,
        max_position_embeddings=64, word_embed_proj_dim=24, dropout=0.0, attention_dropout=0.0,
    )


def siglip(layers: int = 2) -> hf.SiglipVisionConfig:
    return hf.SiglipVisionConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=4,
        image_size=IMAGE_SIZE, patch_size=8,
    )


def clip() -> hf.CLIPVisionConfig:
    return hf.CLIPVisionConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        image_size=IMAGE_SIZE, patch_size=8,
    )


def dinov2() -> hf.Dinov2Config:
    return hf.Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=2,
        image_size=IMAGE_SIZE, patch_size=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def whisper() -> hf.WhisperConfig:
    return hf.WhisperConfig(
        d_model=24, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=32,
        num_mel_bins=MEL_BINS, max_source_positions=AUDIO_FRAMES // 2, dropout=0.0,
        decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32, vocab_size=V,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )


MODEL_CLASSES = {
    hf.LlamaConfig: hf.LlamaForCausalLM,
    hf.Qwen3Config: hf.Qwen3ForCausalLM,
    hf.Gemma3TextConfig: hf.Gemma3ForCausalLM,
    hf.GPT2Config: hf.GPT2LMHeadModel,
    hf.OPTConfig: hf.OPTForCausalLM,
    hf.SiglipVisionConfig: hf.SiglipVisionModel,
    hf.CLIPVisionConfig: hf.CLIPVisionModel,
    hf.Dinov2Config: hf.Dinov2Model,
    hf.WhisperConfig: WhisperEncoder,
}


def build(config: hf.PretrainedConfig, seed: int = 0) -> nn.Module:
    """Return a live model with random weights, including biases and norms."""
    torch.manual_seed(seed)
    made = MODEL_CLASSES.get(type(config), hf.AutoModelForCausalLM.from_config)
    model = made(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.nn.functional.gelu(self.norm(self.conv(hidden)))


class PlainCNN(nn.Module):
    """Encoder without a Hugging Face config: (B, 3, S, S) -> (B, width, S/8, S/8)."""

    def __init__(self, width: int = 12, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, stride=8)
        self.blocks = nn.ModuleList(ConvBlock(width) for _ in range(depth))
        self.head = nn.Conv2d(width, width, 1)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(pixel_values)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def make_cnn(width: int = 12, depth: int = 3) -> PlainCNN:
    """Build the encoder for ``FactorySource("tests.support.parity_models:make_cnn")``."""
    return PlainCNN(width, depth)


def images(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(count, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)}


def sounds(count: int, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_features": torch.randn(count, MEL_BINS, AUDIO_FRAMES, generator=generator)}


def text(
    lengths: Sequence[int],
    seed: int = 0,
    placeholders: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> dict[str, torch.Tensor]:
    """Return random text, padded on the right; the first two tokens of a sample have no label.

    Args:
        lengths: ordinary tokens per sample.
        placeholders: per sample, runs of (token id, count) after its first token.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, labels = [], []
    for index, length in enumerate(lengths):
        ordinary = torch.randint(3, 90, (length,), generator=generator)
        runs = placeholders[index] if placeholders else ()
        between = torch.tensor([token for token, count in runs for _ in range(count)]).long()
        rows.append(torch.cat([ordinary[:1], between, ordinary[1:]]))
        ignored = torch.full((len(between) + 2,), -100)
        labels.append(torch.cat([ignored, ordinary[2:]]))
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(rows, batch_first=True, padding_value=0),
        "labels": pad(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
    }


def batch(
    lengths: Sequence[int], seed: int = 0, placeholders: Any = None, **items: Sequence[int]
) -> dict[str, Any]:
    """Return a microbatch.

    ``items`` gives the row of each item per modality; ``audio`` gets audio, others get images.
    """
    result: dict[str, Any] = text(lengths, seed, placeholders)
    for name, rows in items.items():
        if rows:
            make = sounds if name == "audio" else images
            tensors = make(len(rows), seed + sum(map(ord, name)))
            result[name] = {**tensors, "sample_index": torch.tensor(rows)}
    return result
