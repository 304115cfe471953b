"""Configurations of the 27 vision-audio-language models of Cornstarch v1, with analytic costs.

Run with `python -m benchmarks.valm_configs` to print a table of sizes and times.

Tables 1 and 6 of the paper give layers, hidden sizes, parameter counts and stages per module;
"VALM-XY" has vision encoder X and audio encoder Y. Values that the paper leaves open come from
published models of about the same size:

- LLM: Llama 3.2 1B; Llama 3.1 8B; the large one has Qwen2.5-32B's feed-forward width and heads with
  Llama's vocabulary.
- Vision: EVA-CLIP's feed-forwards, 6144 of EVA-g and 5x the width in EVA-CLIP-8B and -18B.
- Audio: Whisper's encoder, feed-forward 4x the width, heads of 64.

A sample is 1024 text tokens, a 1280x720 image and 30 s of audio. The image is resized to
EVA-CLIP-8B-plus's 448x448 in patches of 14: 1025 tokens with the class token; the audio gives
Whisper's 1500. The LLM sees 3549 tokens, within the paper's 1.5k to 4k. Its attention is counted as
causal, its head runs on the text tokens.

Costs are those of one A40 of a group with tp=2 and cp=2, in bf16, one sample per microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from raymm.costs.analytic import analytic_layers, projector_layers
from raymm.costs.load import Load
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode

DEVICE, DTYPE, TP, CP = "A40", "bf16", 2, 2
MICROBATCHES = 24
TEXT_TOKENS = 1024
IMAGE_SIZE, PATCH_SIZE = 448, 14
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2 + 1
AUDIO_TOKENS = 1500
MERGED_TOKENS = TEXT_TOKENS + IMAGE_TOKENS + AUDIO_TOKENS

TRAINABLE = ("align", "sft", "full")
# Per size: layers, hidden size, feed-forward width, heads; then the paper's parameter count.
LLM = {
    "S": (16, 2048, 8192, 32, 1.2e9),
    "M": (32, 4096, 14336, 32, 8e9),
    "L": (64, 5120, 27648, 40, 32e9),
}
VISION = {
    "S": (40, 1408, 6144, 16, 1e9),
    "M": (32, 4096, 20480, 32, 8e9),
    "L": (48, 5120, 25600, 40, 18e9),
}
AUDIO = {
    "S": (32, 1920, 7680, 30, 1.4e9),
    "M": (40, 3840, 15360, 60, 7e9),
    "L": (48, 5120, 20480, 80, 15e9),
}


@dataclass(frozen=True)
class ValmConfig:
    """Row of Table 6.

    Attributes:
        llm, vision, audio: sizes, ``"S"``, ``"M"`` or ``"L"``.
        cornstarch: pipeline stages of (LLM, vision, audio).
        colocated: pipeline stages of (LLM, both encoders on the same ranks).
    """

    llm: str
    vision: str
    audio: str
    cornstarch: tuple[int, int, int]
    colocated: tuple[int, int]

    @property
    def name(self) -> str:
        return f"LLM-{self.llm} VALM-{self.vision}{self.audio}"


_TABLE_6: dict[str, Sequence[tuple[tuple[int, int], tuple[int, int, int]]]] = {
    "S": (
        ((3, 4), (3, 1, 1)), ((1, 3), (3, 1, 4)), ((1, 4), (3, 1, 5)),
        ((2, 4), (3, 3, 1)), ((1, 4), (3, 2, 3)), ((1, 5), (3, 2, 4)),
        ((1, 4), (3, 5, 1)), ((1, 6), (2, 4, 3)), ((5, 2), (2, 3, 3)),
    ),
    "M": (
        ((5, 2), (5, 1, 1)), ((4, 3), (5, 1, 1)), ((3, 4), (4, 1, 2)),
        ((4, 4), (4, 2, 1)), ((3, 4), (4, 1, 1)), ((2, 4), (3, 1, 1)),
        ((2, 4), (4, 2, 1)), ((2, 4), (4, 2, 2)), ((2, 5), (5, 1, 1)),
    ),
    "L": (
        ((5, 1), (5, 1, 1)), ((5, 2), (5, 1, 1)), ((5, 2), (5, 1, 1)),
        ((4, 1), (5, 1, 1)), ((4, 2), (5, 1, 1)), ((4, 3), (5, 1, 1)),
        ((4, 2), (5, 1, 1)), ((4, 3), (5, 1, 1)), ((4, 3), (5, 1, 1)),
    ),
}
VALM_CONFIGS: tuple[ValmConfig, ...] = tuple(
    ValmConfig(llm, vision, audio, cornstarch, colocated)
    for llm, rows in _TABLE_6.items()
    for (vision, audio), (colocated, cornstarch) in zip(
        ((v, a) for v in "SML" for a in "SML"), rows, strict=True
    )
)


@cache
def module_costs(
    kind: str, size: str, tokens: int | None = None, tp: int = TP, cp: int = CP
) -> tuple[LayerCost, ...]:
    """Return costs of ``"llm"``, ``"vision"`` or ``"audio"`` of a size, without projector.
    ``tokens`` is the merged length of the language model, by default that of all modalities."""
    loads = {
        "llm": Load(1, tokens or MERGED_TOKENS, labels=TEXT_TOKENS),
        "vision": Load(1, IMAGE_TOKENS),
        "audio": Load(1, AUDIO_TOKENS),
    }
    skeleton = build_skeleton(kind, size)
    return analytic_layers(
        skeleton, loads[kind], DEVICE, DTYPE, causal=kind == "llm", tp=tp, cp=cp
    )


def build_skeleton(kind: str, size: str):
    """Build the module on the meta device."""
    from transformers import (
        CLIPVisionConfig,
        CLIPVisionModel,
        LlamaConfig,
        LlamaForCausalLM,
        WhisperConfig,
    )
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    from raymm.actors.weights.source import ConfigSource

    layers, hidden, inner, heads, _ = {"llm": LLM, "vision": VISION, "audio": AUDIO}[kind][size]
    if kind == "llm":
        config = LlamaConfig(
            num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner,
            num_attention_heads=heads, num_key_value_heads=8, vocab_size=128256,
            max_position_embeddings=131072, tie_word_embeddings=size == "S",
        )
        return ConfigSource(LlamaForCausalLM, config).skeleton()
    if kind == "vision":
        config = CLIPVisionConfig(
            num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner,
            num_attention_heads=heads, image_size=IMAGE_SIZE, patch_size=PATCH_SIZE,
        )
        return ConfigSource(CLIPVisionModel, config).skeleton()
    config = WhisperConfig(
        encoder_layers=layers, d_model=hidden, encoder_ffn_dim=inner,
        encoder_attention_heads=heads, max_source_positions=AUDIO_TOKENS,
    )
    return ConfigSource(WhisperEncoder, config).skeleton()


@cache
def projector_costs(
    kind: str, size: str, llm: str, tp: int = TP, cp: int = CP
) -> tuple[LayerCost, ...]:
    """Return costs of the linear projector from an encoder of a size to a language model."""
    import torch

    from raymm.actors.modules.projector import Projector, ProjectorConfig

    tokens = {"vision": IMAGE_TOKENS, "audio": AUDIO_TOKENS}[kind]
    width = {"vision": VISION, "audio": AUDIO}[kind][size][1]
    with torch.device("meta"):
        projector = Projector(ProjectorConfig("linear", width, LLM[llm][1]))
    return projector_layers(projector, Load(1, tokens), DEVICE, DTYPE, tp=tp, cp=cp)


def valm_profile(
    llm: str, vision: str, audio: str, trainable: str = "align"
) -> tuple[ModuleGraph, CostProfile]:
    """Return graph and costs of a model; encoders have linear projectors as their last layers.

    Args:
        llm, vision, audio: sizes, ``"S"``, ``"M"`` or ``"L"``.
        trainable: ``"align"``, only the projectors; ``"sft"``, projectors and LLM; ``"full"``,
            everything.

    Raises:
        ValueError: unknown size or ``trainable``.
    """
    for name, size in (("llm", llm), ("vision", vision), ("audio", audio)):
        if size not in LLM:
            raise ValueError(f"{name} is {size!r}; accepted: {', '.join(LLM)}")
    if trainable not in TRAINABLE:
        raise ValueError(f"trainable is {trainable!r}; accepted: {', '.join(TRAINABLE)}")
    modules = {
        "vision": module_costs("vision", vision) + projector_costs("vision", vision, llm),
        "audio": module_costs("audio", audio) + projector_costs("audio", audio, llm),
        "llm": module_costs("llm", llm),
    }
    full = trainable == "full"
    nodes = tuple(
        ModuleNode(name, (full,) * (len(modules[name]) - 1) + (True,), projector=True)
        for name in ("vision", "audio")
    ) + (ModuleNode("llm", (trainable != "align",) * len(modules["llm"])),)
    graph = ModuleGraph(nodes, (("vision", "llm"), ("audio", "llm")))
    tokens = {"vision": IMAGE_TOKENS, "audio": AUDIO_TOKENS, "llm": MERGED_TOKENS}
    return graph, CostProfile(modules, DEVICE, DTYPE, "analytic", tokens)


def _main() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{MERGED_TOKENS} tokens per sample, one {DEVICE} of tp={TP} x cp={CP}")
    for column in ("module", "size", "layers", "parameters", "paper", "F ms", "B_d ms", "B_w ms"):
        table.add_column(column, justify="left" if column in ("module", "size") else "right")
    for kind, sizes in (("llm", LLM), ("vision", VISION), ("audio", AUDIO)):
        for size, (layers, *_, stated) in sizes.items():
            numel = sum(p.numel() for p in build_skeleton(kind, size).parameters())
            costs = module_costs(kind, size)
            times = [
                f"{1e3 * sum(getattr(c, name) for c in costs):.1f}"
                for name in ("forward", "backward_input", "backward_weight")
            ]
            table.add_row(
                kind, size, str(layers), f"{numel / 1e9:.2f} b", f"{stated / 1e9:g} b", *times
            )
    Console().print(table)


if __name__ == "__main__":
    _main()
