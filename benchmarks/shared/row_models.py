"""Folders of tiny processors and tokenizers, each with a published chat template's shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import transformers

from benchmarks.shared.templates import SHAPES, make_tokenizer
from examples.vlm.kinds import KINDS

_QWEN_SIZE = {
    "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 28**2, "longest_edge": 16 * 28**2},
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Processor or tokenizer that reads the rows.

    Attributes:
        processor: class of the processor; None for a tokenizer alone.
        parts: argument of the processor -> factory.
        options: additional arguments of the processor.
        tokens: special tokens in addition to those of the template.
        named: attribute of the tokenizer -> special token.
        training: True for TRL's variant of the template with generation blocks.
    """

    shape: str
    processor: str | None = None
    parts: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    media: frozenset[str] = frozenset()
    training: bool = False

    @property
    def template(self) -> str:
        """Return the Jinja text of the template."""
        shape = SHAPES[self.shape]
        text = shape.training if self.training else shape.template
        assert text is not None, f"TRL has no training template of {self.shape}"
        return text


def _tiny(kind: str, shape: str, *media: str) -> Target:
    spec = KINDS[kind]
    return Target(
        shape, spec.processor, spec.parts, spec.options, tuple(spec.tokens), spec.named,
        frozenset(media),
    )


TARGETS: dict[str, Target] = {
    **{
        f"{shape} (tokenizer)": Target(shape)
        for shape in ("chatml", "llama3_1", "mistral_v3", "qwen2_5", "qwen3", "glm4moe")
    },
    "qwen2_5_vl": _tiny("qwen2_5_vl", "qwen2_5_vl", "image", "video"),
    "qwen3_vl": _tiny("qwen3_vl", "qwen3_vl", "image", "video"),
    "qwen3_5": _tiny("qwen3_vl", "qwen3_5_think", "image", "video"),
    "gemma3": _tiny("gemma3", "gemma3", "image"),
    "llava_onevision": _tiny("llava_onevision", "llava_onevision", "image", "video"),
    "internvl": _tiny("internvl", "internvl", "image", "video"),
    "mistral3": _tiny("mistral3", "mistral_small", "image"),
    "idefics3": _tiny("idefics3", "idefics3", "image"),
    "smolvlm": _tiny("smolvlm", "smolvlm", "image", "video"),
    "qwen2_audio": _tiny("qwen2_audio", "qwen2_audio", "audio"),
    "glm4v": Target(
        "glm4_5v", "Glm4vProcessor",
        {
            "image_processor": lambda: transformers.Glm4vImageProcessor(**_QWEN_SIZE),
            "video_processor": lambda: transformers.Glm4vVideoProcessor(**_QWEN_SIZE),
        },
        media=frozenset({"image", "video"}),
    ),
    "mllama": Target(
        "llama3_2_vision", "MllamaProcessor",
        {"image_processor": lambda: transformers.MllamaImageProcessor(
            size={"height": 56, "width": 56}, max_image_tiles=2,
        )},
        media=frozenset({"image"}),
    ),
    "llava_next": Target(
        "llava_next", "LlavaNextProcessor",
        {"image_processor": lambda: transformers.LlavaNextImageProcessor(
            size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56},
            image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
        )},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "image_token": "<image>"},
        media=frozenset({"image"}),
    ),
    **{
        f"{shape} (TRL's training template)": Target(shape, training=True)
        for shape in ("qwen2_5", "qwen3", "glm4moe")
    },
    **{
        f"{shape} (TRL's training template)": replace(
            _tiny(kind, shape, "image"), training=True
        )
        for kind, shape in (
            ("qwen2_5_vl", "qwen2_5_vl"), ("qwen3_vl", "qwen3_5_think"), ("gemma3", "gemma3"),
        )
    },
}  # fmt: skip


def save(target: Target, folder: Path) -> Path:
    """Save the processor or the tokenizer of a target; return its folder."""
    shape = SHAPES[target.shape]
    tokenizer = make_tokenizer(shape, target.tokens, target.named)
    if target.processor is None:
        tokenizer.chat_template = target.template
        tokenizer.save_pretrained(folder)
        return folder
    processor = getattr(transformers, target.processor)(
        **{name: make() for name, make in target.parts.items()}, tokenizer=tokenizer,
        chat_template=target.template, **target.options,
    )
    processor.save_pretrained(folder)
    return folder
