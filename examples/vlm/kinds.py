"""Tiny models of every kind: configuration, processor and chat template, as published ones have
them but for their sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers

# Values of a configuration that are ids of tokens are given as the tokens: "id:<image>".
ID = "id:"
_TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 2048,
}
_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 56, "patch_size": 14,
}
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_IDS = {
    "image_token_id": "id:<|image_pad|>", "video_token_id": "id:<|video_pad|>",
    "vision_start_token_id": "id:<|vision_start|>", "vision_end_token_id": "id:<|vision_end|>",
}


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        model: its class in transformers.
        config: values of its configuration.
        processor: its processor's class.
        parts: components of the processor in addition to a tokenizer, by argument.
        options: of the processor.
        tokens: special tokens in addition to those of ChatML.
        named: those that the tokenizer knows by a name.
        item: what the chat template writes for an item.
        sound: whether items are sounds.
        text: True if rows have no items; the folder then has a tokenizer and no processor.
    """

    model: str
    config: Mapping[str, Any]
    processor: str
    parts: Mapping[str, Callable[[], Any]]
    tokens: tuple[str, ...]
    item: str
    options: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    sound: bool = False
    text: bool = False


def _made(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**options)


def _qwen(model: str, patch: int, vision: Mapping[str, Any], video: str, **text: Any) -> Kind:
    pixels = {"shortest_edge": (2 * patch) ** 2, "longest_edge": 16 * (2 * patch) ** 2}
    size = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "size": pixels}
    return Kind(
        f"{model}ForConditionalGeneration",
        {
            "text_config": {**_TEXT, "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3],
            }, **text},
            "vision_config": {
                "depth": 4, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4,
                "out_hidden_size": 64, "patch_size": patch, **vision,
            },
            **_QWEN_IDS,
        },
        f"{model}Processor",
        {
            "image_processor": _made("Qwen2VLImageProcessor", **size),
            "video_processor": _made(video, **size),
        },
        _QWEN_TOKENS, _QWEN_IMAGE,
    )


KINDS: dict[str, Kind] = {
    "qwen2_5_vl": _qwen(
        "Qwen2_5_VL", 14, {"window_size": 56, "fullatt_block_indexes": [1, 3]},
        "Qwen2VLVideoProcessor",
    ),
    "qwen3_vl": _qwen(
        "Qwen3VL", 16, {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 64},
        "Qwen3VLVideoProcessor",
    ),
    "gemma3": Kind(
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**_TEXT, "query_pre_attn_scalar": 16, "sliding_window": 32},
            "vision_config": _SIGLIP | {"vision_use_head": False},
            "mm_tokens_per_image": 4, "image_token_index": "id:<image_soft_token>",
            "boi_token_index": "id:<start_of_image>", "eoi_token_index": "id:<end_of_image>",
        },
        "Gemma3Processor",
        {"image_processor": _made("Gemma3ImageProcessor", size={"height": 56, "width": 56})},
        (), "<start_of_image>", {"image_seq_length": 4},
        {
            "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    ),
    "llava_onevision": Kind(
        "LlavaOnevisionForConditionalGeneration",
        {
            "text_config": {"model_type": "qwen2", **_TEXT}, "vision_config": _SIGLIP,
            "image_token_index": "id:<image>", "video_token_index": "id:<video>",
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
        },
        "LlavaOnevisionProcessor",
        {
            "image_processor": _made(
                "LlavaOnevisionImageProcessor", size={"height": 56, "width": 56},
                image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
            ),
            "video_processor": _made(
                "LlavaOnevisionVideoProcessor", size={"height": 56, "width": 56}
            ),
        },
        ("<image>", "<video>"), "<image>",
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "internvl": Kind(
        "InternVLForConditionalGeneration",
        {
            "text_config": {"model_type": "qwen2", **_TEXT},
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
                "num_attention_heads": 4, "image_size": [56, 56], "patch_size": [14, 14],
            },
            "image_token_id": "id:<IMG_CONTEXT>", "image_seq_length": 4,
        },
        "InternVLProcessor",
        {
            "image_processor": _made(
                "GotOcr2ImageProcessor", size={"height": 56, "width": 56}, max_patches=3
            ),
            "video_processor": _made("InternVLVideoProcessor", size={"height": 56, "width": 56}),
        },
        (), "<IMG_CONTEXT>\n", {"image_seq_length": 4},
        {
            "start_image_token": "<img>", "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
        },
    ),
    "mistral3": Kind(
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {"model_type": "mistral", **_TEXT},
            "vision_config": {
                "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64,
                "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 112,
                "patch_size": 14, "head_dim": 8,
            },
            "image_token_index": "id:[IMG]", "vision_feature_layer": -1,
        },
        "PixtralProcessor",
        {"image_processor": _made(
            "PixtralImageProcessor", size={"longest_edge": 112}, patch_size=14
        )},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), "[IMG]",
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "idefics3": Kind(
        "Idefics3ForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
                "num_attention_heads": 4, "image_size": 56, "patch_size": 14,
            },
            "image_token_id": "id:<image>", "scale_factor": 2,
        },
        "Idefics3Processor",
        {"image_processor": _made(
            "Idefics3ImageProcessor", size={"longest_edge": 112},
            max_image_size={"longest_edge": 56},
        )},
        (
            "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
            *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
        ),
        "<image>", {"image_seq_len": 4},
    ),
    "smolvlm": Kind(
        "SmolVLMForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
                "num_attention_heads": 4, "image_size": 56, "patch_size": 14,
            },
            "image_token_id": "id:<image>", "scale_factor": 2,
        },
        "SmolVLMProcessor",
        {
            "image_processor": _made(
                "SmolVLMImageProcessor", size={"longest_edge": 112},
                max_image_size={"longest_edge": 56},
            ),
            "video_processor": _made(
                "SmolVLMVideoProcessor", size={"longest_edge": 56},
                max_image_size={"longest_edge": 56},
            ),
        },
        (
            "<image>", "<video>", "<fake_token_around_image>", "<global-img>",
            "<end_of_utterance>",
            *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
        ),
        "<image>", {"image_seq_len": 4},
    ),
    "qwen2_audio": Kind(
        "Qwen2AudioForConditionalGeneration",
        {
            "text_config": {"model_type": "qwen2", **_TEXT},
            "audio_config": {
                "model_type": "qwen2_audio_encoder", "num_mel_bins": 16, "encoder_layers": 3,
                "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "d_model": 32,
                "max_source_positions": 50,
            },
            "audio_token_index": "id:<|AUDIO|>",
        },
        "Qwen2AudioProcessor",
        {"feature_extractor": _made("WhisperFeatureExtractor", feature_size=16, chunk_length=1)},
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        "<|audio_bos|><|AUDIO|><|audio_eos|>", sound=True,
    ),
}  # fmt: skip
TEXT_KINDS: dict[str, Kind] = {
    "llama": Kind("LlamaForCausalLM", {"text_config": _TEXT}, "", {}, (), "", text=True),
}
