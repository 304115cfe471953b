"""Hints for vision-language classes, by class name, used by this benchmark alone.

They describe inputs that names and defaults do not imply, and defaults that are inconsistent when
they are small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig

Item = dict[str, torch.Tensor]
Random = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Hint:
    """Hint for one class.

    Attributes:
        default: changes of its defaults before shrinking, by dotted name.
        config: changes of the small configuration.
        make: function that makes an item of the n-th size; None to use the parameter names.
        per_row: True if rows of items have a separate dimension.
        token: placeholder id; None to use the configuration.
        tokens: placeholders of the first and second item; empty for as many as there are features.
        always: True if the class does not accept text alone.
        more: additional text inputs, computed from ids (B, T), item positions (B, T) bool, and
            items.
    """

    default: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    make: Callable[[Any, int, Random], Item] | None = None
    modality: str = "image"
    per_row: bool = False
    token: int | None = None
    tokens: tuple[int, ...] = ()
    always: bool = False
    more: Callable[[torch.Tensor, torch.Tensor, Item], Item] | None = None


def set_values(config: PretrainedConfig, values: dict[str, Any]) -> None:
    """Change a configuration, by dotted name."""
    for path, value in values.items():
        part: Any = config
        *parents, name = path.split(".")
        for parent in parents:
            part = getattr(part, parent)
        setattr(part, name, value)


def _fuyu(config: Any, n: int, random: Random) -> Item:
    return {"pixel_values": random(1, 4, config.num_channels * config.patch_size**2)}


def _gemma_unified(config: Any, n: int, random: Random) -> Item:
    side = config.vision_config.model_patch_size
    grid = torch.stack(torch.meshgrid(torch.arange(3 + n), torch.arange(3), indexing="xy"), -1)
    places = grid.reshape(1, -1, 2)
    return {"pixel_values": random(1, places.shape[1], 3 * side**2), "image_position_ids": places}


def _docling(config: Any, n: int, random: Random) -> Item:
    side = config.vision_config.image_size
    return {
        "pixel_values": random(1, 3, side, side),
        "pixel_attention_mask": torch.ones(1, dtype=torch.bool),
    }


def _mllama(config: Any, n: int, random: Random) -> Item:
    side = config.vision_config.image_size
    return {
        "pixel_values": random(1, 4, 3, side, side),
        "aspect_ratio_ids": torch.tensor([1 + n]),
        "aspect_ratio_mask": torch.tensor([[1] + [int(n > 0)] + [0, 0]]),
    }


def _inkling(config: Any, n: int, random: Random) -> Item:
    side = config.vision_config.patch_size
    return {"pixel_values": random(2 + n, config.vision_config.temporal_patch_size, side, side, 3)}


def _inkling2(config: Any, n: int, random: Random) -> Item:
    side = config.vision_config.patch_size * config.vision_config.spatial_merge_size
    return {
        "pixel_values": random(2 * (2 + n), side, side, 3),
        "image_grid_thw": torch.tensor([[1, 2, 2 + n]]),
    }


def _frames(name: str, mask: str, width: int, frames: int) -> Callable[[Any, int, Random], Item]:
    def make(config: Any, n: int, random: Random) -> Item:
        there = frames - 8 * n
        item = {name: random(1, frames, width)}
        if mask:
            item[mask] = (torch.arange(frames) < there).long()[None]
        return item

    return make


def _molmo(config: Any, n: int, random: Random) -> Item:
    wide = 3 * config.vision_config.patch_size**2
    tokens = 4 + 2 * (2 + n)
    return {
        "pixel_values": random(2, 16, wide),
        "image_token_pooling": torch.arange(4 * tokens).reshape(tokens, 4) % 32,
        "image_grids": torch.tensor([[2, 2, 2, 2 + n]]),
        "image_num_crops": torch.tensor([2]),
    }


def _idefics(config: Any, n: int, random: Random) -> Item:
    side = config.vision_config.image_size
    return {"pixel_values": random(1, 3, side, side)}


def _attends_all(ids: torch.Tensor, own: torch.Tensor, items: Item) -> Item:
    images = items["pixel_values"].shape[1]
    return {"image_attention_mask": torch.ones(*ids.shape, images, dtype=torch.long)}


def _instruct_video(config: Any, n: int, random: Random) -> Item:
    side = config.vision_config.image_size
    return {
        "pixel_values": random(1, 2, 3, side, side), "qformer_input_ids": torch.full((1, 4), 5),
        "qformer_attention_mask": torch.ones(1, 4, dtype=torch.long),
    }  # fmt: skip


def _picture(config: Any, n: int, random: Random) -> Item:
    side = config.vision_config.image_size
    return {"pixel_values": random(1, 3, side, side)}


def _place(ids: torch.Tensor, own: torch.Tensor, items: Item) -> Item:
    return {"image_embeds_position_mask": own.long()}


def _flattened(config: Any, n: int, random: Random) -> Item:
    patches = random(1, 8, 2 + config.vision_config.patch_embed_hidden_size)
    patches[..., 0] = torch.arange(8) // 4 + 1
    patches[..., 1] = torch.arange(8) % 4 + 1
    return {"flattened_patches": patches}


def _protein(config: Any, n: int, random: Random) -> Item:
    return {
        "protein_input_ids": torch.arange(4, 16)[None],
        "protein_attention_mask": torch.ones(1, 12, dtype=torch.long),
    }


def _sound(name: str, bins: int, frames: int, mask: str) -> Callable[[Any, int, Random], Item]:
    def make(config: Any, n: int, random: Random) -> Item:
        item = {name: random(1, bins, frames)}
        if mask:
            item[mask] = (torch.arange(frames) < frames - 16 * n).long()[None]
        return item

    return make


def _crops(config: Any, n: int, random: Random) -> Item:
    """Return a picture as 1 or 2 crops that follow one of the full picture."""
    side, crops = config.vision_config.crop_size, 1 + n
    patches = side // config.vision_config.patch_size
    return {
        "image_pixel_values": random(1, 1 + crops, 3, side, side),
        "image_sizes": torch.tensor([[side, crops * side]]),
        "image_attention_mask": torch.ones(1, 1 + crops, patches, patches),
    }


def _samples(config: Any, n: int, random: Random) -> Item:
    there = 3200 - 1600 * n
    return {"input_values": random(1, 1, 3200), "padding_mask": (torch.arange(3200) < there)[None]}


def _eight_frames_a_token(ids: torch.Tensor, own: torch.Tensor, items: Item) -> Item:
    shape = len(ids), 128, 8 * ids.shape[1]
    return {"input_features": torch.randn(shape, generator=torch.Generator().manual_seed(2))}


def _codes(ids: torch.Tensor, own: torch.Tensor, items: Item) -> Item:
    return {"input_ids": ids[..., None].expand(-1, -1, 33).contiguous()}


_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
HINTS: dict[str, Hint] = {
    "AriaForConditionalGeneration": Hint(
        config={"projector_patch_to_query_dict": {1: 2, 4: 4, 16: 8}}
    ),
    "FuyuForCausalLM": Hint(make=_fuyu),
    "Gemma4UnifiedForConditionalGeneration": Hint(make=_gemma_unified),
    "GraniteDoclingForConditionalGeneration": Hint(make=_docling, per_row=True),
    "Llama4ForConditionalGeneration": Hint(config={
        "vision_config.projector_input_dim": 64, "vision_config.projector_output_dim": 64,
        "vision_config.vision_output_dim": 64,
    }),
    "MllamaForConditionalGeneration": Hint(
        config={"vision_config.vision_output_dim": 128}, make=_mllama, per_row=True, tokens=(1, 1)
    ),
    "MuseGlimmerForConditionalGeneration": Hint(config={"out_hidden_size": 256}),
    "MuseSparkForConditionalGeneration": Hint(config={"out_hidden_size": 256}),
    "InklingForConditionalGeneration": Hint(
        config={"vision_config.patch_size": 20}, make=_inkling
    ),
    "Inkling2ForConditionalGeneration": Hint(make=_inkling2),
    "GraniteSpeechForConditionalGeneration": Hint(
        config={"projector_config.encoder_hidden_size": 64},
        make=_frames("input_features", "", 10, 64), modality="audio",
    ),
    "GraniteSpeechPlusForConditionalGeneration": Hint(
        config={"projector_config.encoder_hidden_size": 64},
        make=_frames("input_features", "", 10, 64), modality="audio",
    ),
    "FunAsrNanoForConditionalGeneration": Hint(
        make=_frames("input_features", "input_features_mask", 560, 64), modality="audio"
    ),
    "Molmo2ForConditionalGeneration": Hint(
        default={"adapter_config.vision_feature_layer": [3, 1]},
        config={"vision_config.image_size": [56, 56], "vision_config.num_position_embeddings": 16,
                "image_token_id": 180},
        make=_molmo,
    ),
    "IdeficsForVisionText2Text": Hint(
        config={"freeze_vision_layers": False, "freeze_text_layers": False},
        make=_idefics, per_row=True, more=_attends_all, always=True,
    ),
    "InstructBlipVideoForConditionalGeneration": Hint(
        config={"video_token_id": 97}, make=_instruct_video, token=97
    ),
    "Kosmos2ForConditionalGeneration": Hint(
        config={"latent_query_num": 4}, make=_picture, token=97, tokens=(4, 4), more=_place,
        always=True,
    ),
    "Kosmos2_5ForConditionalGeneration": Hint(
        config={"latent_query_num": 4}, make=_flattened, token=97, tokens=(4, 4), more=_place,
        always=True,
    ),
    "EvollaForProteinText2Text": Hint(make=_protein),
    "Phi4MultimodalForCausalLM": Hint(
        default={"vision_config.image_size": 56, "vision_config.crop_size": 56},
        config={"vision_config.image_token_id": 97, "vision_config.image_size": 56,
                "vision_config.crop_size": 56, "vision_config.patch_size": 14},
        make=_crops, token=97, tokens=(13, 17),
    ),
    "Qwen2AudioForConditionalGeneration": Hint(
        config={"audio_config.max_source_positions": 64}, modality="audio",
        make=_sound("input_features", 128, 128, "feature_attention_mask"), tokens=(32, 28),
    ),
    "Cosmos3EdgeForConditionalGeneration": Hint(
        default={"text_config.rope_parameters": {
            "rope_type": "default", "rope_theta": 1e8, "mrope_section": [32, 16, 16],
        }},
    ),
    "Dots3NoteForConditionalGeneration": Hint(config={
        "text_config.layer_types": ["indexed_attention"] * 4, "text_config.per_layer_config": {},
    }),
    "Step3p7ForConditionalGeneration": Hint(config={"text_config.sliding_window": 16}),
    "VoxtralRealtimeForConditionalGeneration": Hint(
        modality="audio", make=_sound("input_features", 128, 64, ""), token=5, tokens=(1, 1),
        more=_eight_frames_a_token, always=True,
    ),
    "KyutaiSpeechToTextForConditionalGeneration": Hint(
        config={"codec_config.upsample_groups": 1}, modality="text", more=_codes,
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": Hint(
        config={"text_config.rope_parameters": dict(_SECTIONS)}
    ),
    "Nemotron3_5TranscribeForConditionalGeneration": Hint(
        modality="audio", make=_frames("input_features", "input_features_mask", 128, 64)
    ),
    "VibeVoiceAsrForConditionalGeneration": Hint(
        config={
            "acoustic_tokenizer_encoder_config.vae_std": 0.0,  # no random numbers
            "acoustic_tokenizer_encoder_config.depths": [1] * 7,
            "semantic_tokenizer_encoder_config.depths": [1] * 7,
            "acoustic_tokenizer_encoder_config.num_filters": 4,
            "semantic_tokenizer_encoder_config.num_filters": 4,
        },
        modality="audio", make=_samples,
    ),
}  # fmt: skip
