"""Features, options and layouts of the layout sweep, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import transformers as hf
from torch import nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from benchmarks.shared.vlm_shares import TOLERANCE
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.optimizer.optimizer_config import EmaConfig, OptimizerConfig
from raymm.kernels.preference import PreferenceLoss
from raymm.runtime.specs import ParallelSpec

VOCABULARY = 97
IMAGE_SIZE, MEL_BINS, AUDIO_FRAMES = 16, 8, 24
# Rows of the first microbatch exceed, and those of the second stay below, the positions for which
# limited rotary embeddings were trained.
TRAINED_POSITIONS = 16
# Under adamw_8bit, weights with 4,096 or more elements have 8-bit moments.
_SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=128, pad_token_id=0,
    attn_implementation="sdpa",
)  # fmt: skip
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_TOWER_SIZES: dict[str, Any] = dict(
    hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    image_size=IMAGE_SIZE, patch_size=8,
)  # fmt: skip


@dataclass(frozen=True)
class Feature:
    """Model of the sweep.

    Attributes:
        config: name of the language model's configuration class in transformers.
        sizes: sizes in addition to the common ones; None removes a common one.
        words: a rejection of the feature contains at least one of these, or of the words of the
            class's name.
        tower: name of the encoder's configuration class; None for no encoder.
        tower_sizes: sizes of the encoder, like ``sizes``.
        modules: arguments of the :class:`raymm.ModalityModule` of ``"vision"`` and ``"llm"``.
        model: arguments of :class:`raymm.MultimodalModule`.
        draws: True for models that use random numbers, such as dropout; their reference is the
            model itself in one process.
        whole_step: True if the loss depends on all rows of a step together.
        left: True for padding before the tokens of a row.
        tolerance: accepted error of a gradient, relative to its own norm. Padding alone changes
            some gradients of linear attention by 2e-4 in transformers.
    """

    config: str = "LlamaConfig"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    tower: str | None = "SiglipVisionConfig"
    tower_sizes: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    draws: bool = False
    whole_step: bool = False
    left: bool = False
    tolerance: float = TOLERANCE

    def language_model(self) -> nn.Module:
        """Return the language model with random weights."""
        return _build(getattr(hf, self.config), _SIZES, self.sizes, 3)

    def encoder(self) -> tuple[nn.Module, nn.Module]:
        """Return the encoder and its projector with random weights."""
        assert self.tower is not None
        tower = _build(getattr(hf, self.tower), TOWERS[self.tower], self.tower_sizes, 1)
        width = _SIZES["hidden_size"]
        return tower, nn.Sequential(nn.Linear(24, width), nn.GELU(), nn.Linear(width, width))


@dataclass(frozen=True)
class WholeFeature(Feature):
    """Model of a transformers class that contains its towers; ``config`` is the class.

    Attributes:
        train: parts of :func:`raymm.from_pretrained`; ``"tower"`` means all towers.
        new_rows: number of tokens at the end of the vocabulary; only their rows are trained.
    """

    train: Mapping[str, Any] = field(default_factory=dict)
    new_rows: int = 0


def _build(
    config_class: Any, common: Mapping[str, Any], own: Mapping[str, Any], seed: int
) -> nn.Module:
    values = {name: value for name, value in {**common, **own}.items() if value is not None}
    config = config_class(**values)
    if config_class is hf.WhisperConfig:
        make: Callable[[Any], nn.Module] = WhisperEncoder
    elif config_class in hf.AutoModelForCausalLM._model_mapping:
        make = hf.AutoModelForCausalLM.from_config
    else:
        make = cast(Any, hf.AutoModel._model_mapping[config_class])
    torch.manual_seed(seed)
    module = make(config)
    with torch.no_grad():  # zero biases and unit norms would be a special case
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    return module


TOWERS: dict[str, dict[str, Any]] = {
    "SiglipVisionConfig": _TOWER_SIZES,
    "CLIPVisionConfig": _TOWER_SIZES,
    "Dinov2Config": _TOWER_SIZES | dict(
        intermediate_size=None, mlp_ratio=2, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    "WhisperConfig": dict(
        d_model=24, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=32,
        num_mel_bins=MEL_BINS, max_source_positions=AUDIO_FRAMES // 2, dropout=0.0,
        decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32, vocab_size=VOCABULARY,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ),
}  # fmt: skip

# Parameters of each type in transformers' ROPE_INIT_FUNCTIONS.
ROPES: dict[str, dict[str, Any]] = {
    "linear": dict(factor=4.0),
    "dynamic": dict(factor=4.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=TRAINED_POSITIONS),
    "longrope": dict(
        short_factor=[1.0] * 8, long_factor=[2.0 + n for n in range(8)],
        original_max_position_embeddings=TRAINED_POSITIONS,
    ),
    "llama3": dict(
        factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=TRAINED_POSITIONS,
    ),
    "proportional": dict(partial_rotary_factor=0.5),
}  # fmt: skip


def _rope(kind: str) -> Feature:
    parameters = dict(rope_type=kind, rope_theta=10_000.0, **ROPES[kind])
    positions = dict(max_position_embeddings=TRAINED_POSITIONS) if kind == "dynamic" else {}
    return Feature(sizes=dict(rope_parameters=parameters, **positions), words=("rope", "rotary"))


LORA = LoraConfig(r=4, alpha=8.0)
DORA = LoraConfig(r=4, alpha=8.0, dora=True, targets=("q_proj", "o_proj", "up_proj", "down_proj"))
RSLORA = replace(LORA, use_rslora=True)
_FROZEN = dict(frozen=True)
_MOE: dict[str, Any] = dict(
    num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.2,
)  # fmt: skip
_BASE = "tied embeddings"
FEATURES: dict[str, Feature] = {
    _BASE: Feature(sizes=dict(tie_word_embeddings=True)),
    "untied embeddings": Feature(),
    "text only": Feature(tower=None),
    **{f"rope {kind}": _rope(kind) for kind in ROPES},
    "sliding window": Feature("MistralConfig", dict(sliding_window=5), ("sliding",)),
    "alternating windows, two ropes": Feature(
        "Gemma3TextConfig", dict(head_dim=16, sliding_window=5, layer_types=_ALTERNATING),
        ("sliding",),
    ),
    "softcaps, alternating windows": Feature(
        "Gemma2Config", dict(
            head_dim=16, sliding_window=5, layer_types=_ALTERNATING, attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0, attn_implementation="eager",
        ), ("softcap",),
    ),
    "qkv biases": Feature("Qwen2Config"),
    "qk norms": Feature("Qwen3Config", dict(head_dim=16)),
    "norms after blocks": Feature("Olmo2Config"),
    "learned positions, biases": Feature(
        "GPT2Config", dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
    "partial rotary, parallel blocks": Feature("PhiConfig", dict(num_key_value_heads=4)),
    "multipliers": Feature("GraniteConfig", dict(
        embedding_multiplier=2.0, logits_scaling=1.5, residual_multiplier=0.7,
        attention_multiplier=0.3)),
    "layers without rope": Feature("SmolLM3Config"),
    "alibi": Feature("BloomConfig", dict(n_layer=4, n_head=4, attn_implementation="eager")),
    "attention sinks, experts": Feature(
        "GptOssConfig", _MOE | dict(
            head_dim=16, num_local_experts=4, sliding_window=6, layer_types=_ALTERNATING,
            attn_implementation="eager",
        ), ("GptOss",), whole_step=True,
    ),
    "experts": Feature(
        "MixtralConfig", _MOE | dict(num_local_experts=4), ("Mixtral", "expert"), whole_step=True),
    "experts in some layers": Feature(
        "Qwen3MoeConfig", _MOE | dict(
            head_dim=16, num_experts=6, moe_intermediate_size=16, mlp_only_layers=[0]),
        ("Qwen3Moe", "expert"), whole_step=True,
    ),
    "latent attention": Feature("DeepseekV3Config", dict(
        num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=16, n_shared_experts=1, first_k_dense_replace=2, q_lora_rank=24,
        kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    ), ("Deepseek",)),
    "short convolutions": Feature("Lfm2Config", dict(
        layer_types=["conv", "full_attention"] * 2, block_multiple_of=16, block_ff_dim=96)),
    "linear attention": Feature("Qwen3NextConfig", dict(
        head_dim=16, layer_types=["linear_attention", "full_attention"] * 2, num_experts=0,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, mlp_only_layers=[0, 1, 2, 3],
    ), tolerance=5e-4),
    "attention in chunks": Feature("Llama4TextConfig", dict(
        head_dim=16, attention_chunk_size=6, num_local_experts=2, moe_layers=[],
        intermediate_size_mlp=96, layer_types=["chunked_attention", "full_attention"] * 2,
    ), ("Llama4",)),
    "padding on the left": Feature(left=True),
    "padding on the left, learned positions": Feature(
        "GPT2Config", dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), left=True),
    "layer drop": Feature(
        "OPTConfig", dict(ffn_dim=96, dropout=0.0, attention_dropout=0.0, layerdrop=0.4),
        ("layerdrop", "layer drop"), draws=True),
    "attention dropout": Feature(
        sizes=dict(attention_dropout=0.2), words=("dropout",), draws=True),
    "hidden dropout": Feature(
        "GPT2Config", dict(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.0), ("dropout", "pdrop"),
        draws=True),
    "tower dropout": Feature(
        tower="Dinov2Config", tower_sizes=dict(hidden_dropout_prob=0.2), words=("dropout",),
        draws=True),
    "LoRA": Feature(modules=dict(vision=_FROZEN, llm=dict(lora=LORA))),
    "DoRA": Feature(modules=dict(vision=_FROZEN, llm=dict(lora=DORA))),
    "rank-stabilised LoRA": Feature(modules=dict(vision=_FROZEN, llm=dict(lora=RSLORA))),
    "LoRA of all parts": Feature(modules=dict(
        vision=dict(lora=LoraConfig(r=3, targets=("q_proj", "fc1")),
                    projector_lora=LoraConfig(r=2, targets=("0", "2"))),
        llm=dict(lora=LoraConfig(r=2, targets=r".*layers\.[12]\..*_proj|lm_head")))),
    "LoRA dropout": Feature(
        modules=dict(vision=_FROZEN, llm=dict(lora=replace(LORA, dropout=0.2))),
        words=("dropout",), draws=True),
    "frozen language model": Feature(modules=dict(llm=_FROZEN)),
    "frozen tower": Feature(modules=dict(vision=_FROZEN)),
    "tower with a class token": Feature(tower="CLIPVisionConfig"),
    "tower with layer scale": Feature(tower="Dinov2Config"),
    "sounds": Feature(tower="WhisperConfig"),
    "images see themselves only": Feature(model=dict(mask="multimodal_isolated"), words=("mask",)),
}  # fmt: skip
_QWEN = "Qwen2_5_VLForConditionalGeneration"
FEATURES |= {
    "positions of images in three dimensions": WholeFeature(_QWEN),
    "features in several layers": WholeFeature("Qwen3VLForConditionalGeneration"),
    "images seen in both directions": WholeFeature("Gemma3ForConditionalGeneration"),
    "new tokens": WholeFeature(
        _QWEN, train={"language_model": LORA, "tower": "frozen"}, new_rows=5, words=("new_rows",)),
}  # fmt: skip


@dataclass(frozen=True)
class Option:
    """Training option.

    Attributes:
        optimizer: fields of :class:`raymm.actors.optimizer.optimizer_config.OptimizerConfig`, in
            addition to the common ones.
        batches: batches whose gradients are accumulated per update.
        averages: True to compare moving averages in a checkpoint instead of parameters. With a
            decay of 0 they are the weights in fp32.
        at: step -> modules that are frozen or trained after it.
        cached: True to cache the features of a frozen tower and read them in later steps.
        feature: feature to try the option with; by default the base.
        model: arguments of :class:`raymm.MultimodalModule`.
        words: a rejection of the option contains at least one of these.
    """

    optimizer: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    batches: int = 1
    averages: bool = False
    at: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    cached: bool = False
    feature: str = _BASE
    model: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    @property
    def config(self) -> OptimizerConfig:
        """Return the optimizer's configuration.

        eps keeps elements whose gradient is rounding error from moving at the full rate; the norm
        makes clipping take effect in every step.
        """
        common: dict[str, Any] = dict(lr=1e-3, eps=1e-5, weight_decay=0.1, max_grad_norm=0.1)
        return OptimizerConfig(**common | dict(self.optimizer))


PLAIN = "adamw, clipping"
_ROWS = dict(vision=dict(frozen=True, projector_frozen=True), llm=dict(lora=LORA))
FEATURES["LoRA alone"] = Feature(modules=_ROWS)
OPTIONS: dict[str, Option] = {
    PLAIN: Option(),
    "no clipping": Option(dict(max_grad_norm=None)),
    "accumulation": Option(batches=2),
    "linear schedule, no decay of norms": Option(
        dict(schedule="linear", total_steps=5, min_lr_ratio=0.1, no_decay=("*norm*", "*.bias"))),
    "decay of everything": Option(dict(no_decay=())),
    "muon": Option(dict(name="muon"), words=("muon",)),
    "adamw_8bit": Option(dict(name="adamw_8bit"), words=("adamw_8bit",)),
    "muon and adamw_8bit by module": Option(
        dict(modules={"vision": {"name": "adamw_8bit"}, "llm": {"name": "muon", "lr": 5e-4},
                      "vision_projector": {"weight_decay": 0.0}}), words=("muon", "adamw_8bit")),
    "moving averages": Option(dict(ema=EmaConfig(0.5)), averages=True),
    "bf16": Option(precision="bf16"),
    "bf16_master": Option(
        dict(parameters="bf16_master", ema=EmaConfig(0.0)), "bf16", averages=True,
        words=("bf16_master",)),
    "bf16_stochastic": Option(
        dict(parameters="bf16_stochastic"), "bf16", words=("bf16_stochastic",)),
    "phases": Option(
        at={1: {"llm": "frozen"}, 2: {"llm": "full", "vision": "frozen"}}),
    "feature cache": Option(feature="frozen tower", cached=True),
    "DPO": Option(feature="LoRA alone", model=dict(preference=PreferenceLoss(0.3))),
    "DPO, reference initial": Option(
        feature="text only", model=dict(preference=PreferenceLoss(0.3, reference="initial"))),
}  # fmt: skip
# Additional pairs of a feature and an option.
PAIRS = (
    ("untied embeddings", "phases"),
    ("experts", "accumulation"), ("experts", "bf16"), ("experts", "muon"),
    ("attention sinks, experts", "moving averages"),
    ("rope dynamic", "accumulation"), ("rope longrope", "bf16"),
    ("softcaps, alternating windows", "bf16"), ("images see themselves only", "bf16"),
    ("attention dropout", "accumulation"), ("LoRA dropout", "moving averages"),
    ("LoRA", "adamw_8bit"), ("DoRA", "bf16_master"), ("LoRA", "feature cache"),
    ("LoRA of all parts", "DPO"),
)


@dataclass(frozen=True)
class Layout:
    """Layout of a model.

    Encoders have the same degrees on the same ranks, except ``pp`` and ``ep``. With ``cp``, towers
    that are given by their class have a separate rank.

    Attributes:
        degrees: fields of :class:`raymm.runtime.specs.ParallelSpec`; ``recompute_layers`` lists the
            blocks in order.
        plan: fields of :class:`raymm.runtime.specs.MultimodalParallelSpec`.
        resumed: degrees of the layout that continues after the first step.
    """

    degrees: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    packing: bool = False
    resumed: Mapping[str, Any] | None = None

    @property
    def words(self) -> set[str]:
        """Return words; a rejection of the layout contains at least one of them."""
        names = {*self.degrees, *self.plan, *(self.resumed or {})} - {"sharding"}
        values = {str(v) for v in (*self.degrees.values(), *self.plan.values()) if type(v) is str}
        return names | values | ({"packing"} if self.packing else set())

    def specs(self, degrees: Mapping[str, Any]) -> tuple[ParallelSpec, ParallelSpec]:
        """Return the specs of encoders and of the language model.

        Args:
            degrees: degrees of the language model; ``degrees`` or ``resumed``.
        """
        alone = ParallelSpec(**{**degrees, "recompute_layers": "keep"})
        ranks = tuple(range(alone.pp * alone.module_replicas))
        own = replace(alone, ranks=ranks)
        return replace(own, pp=1, chunks=1, ep=1, ranks=ranks[:: alone.pp]), own


_FSDP = dict(dp=2, sharding="fsdp")
LAYOUTS: dict[str, Layout] = {
    "one process": Layout(),
    "pp 2": Layout(dict(pp=2)),
    "pp 2, chunks 2": Layout(dict(pp=2, chunks=2)),
    "zero bubble": Layout(dict(pp=2), dict(schedule="zero_bubble")),
    "tp 2": Layout(dict(tp=2)),
    "cp 2": Layout(dict(cp=2)),
    "dp 2": Layout(dict(dp=2)),
    "zero1": Layout(dict(dp=2, sharding="zero1")),
    "fsdp 2": Layout(_FSDP),
    "ep 2": Layout(_FSDP | dict(ep=2)),
    "packing": Layout(packing=True),
    "recompute": Layout(dict(pp=2), dict(recompute=True)),
    "recompute layers": Layout(dict(recompute_layers=("all", "matmuls", "attention"))),
    "offload": Layout(dict(recompute_layers="offload")),
    "tp 2, pp 2": Layout(dict(tp=2, pp=2)),
    "tp 2, cp 2": Layout(dict(tp=2, cp=2)),
    "cp 2, fsdp 2": Layout(_FSDP | dict(cp=2)),
    "pp 2, fsdp 2": Layout(_FSDP | dict(pp=2)),
    "packing, cp 2": Layout(dict(cp=2), packing=True),
    "packing, fsdp 2": Layout(_FSDP, packing=True),
    "pp 2, resumed with tp 2": Layout(dict(pp=2), resumed=dict(tp=2)),
    "fsdp 2, resumed with cp 2": Layout(_FSDP, resumed=dict(cp=2)),
}  # fmt: skip
