"""FLOPs of a step equal torch's count, without masked pairs and padding."""

import itertools

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cost_truth import CUSTOM_FLOPS
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.modules.merge import ReplaceTokens
from raymm.costs.load import Load
from raymm.costs.step_flops import StepFlops, module_flops
from raymm.data.loading.in_memory import describe_microbatches
from raymm.data.samples.collate import describe
from raymm.model.batch_rules import complete_microbatch
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule

IMAGE = 3
LLAMA = dict(
    hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=64, attn_implementation="eager",
)
SIGLIP = dict(
    hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
    image_size=8, patch_size=4, vision_use_head=False, attn_implementation="eager",
)


def built(config: hf.PretrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    kinds = {"llama": hf.LlamaForCausalLM, "siglip_vision_model": hf.SiglipVisionModel,
             "mistral": hf.MistralForCausalLM}
    return kinds[config.model_type](config)


def described(
    vision=False, projector=False, llm=False, config=None, merge=None, mask=None, lora=None
):
    tower = ModalityModule(
        built(hf.SiglipVisionConfig(**SIGLIP)), "mlp", frozen=vision, projector_frozen=projector
    )
    frozen = llm if lora is None else None
    language = ModalityModule(built(config or hf.LlamaConfig(**LLAMA)), frozen=frozen, lora=lora)
    return MultimodalModule({"vision": tower}, language, merge, mask)


def batch(lengths, images, width=None, ids=None):
    """Return padded rows of text of some lengths, and images of some rows."""
    width = width or max(lengths)
    tokens = torch.full((len(lengths), width), 5) if ids is None else torch.tensor(ids)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return {
        "input_ids": tokens, "attention_mask": mask.long(),
        "labels": tokens.masked_fill(~mask, -100),
        "vision": {"pixel_values": torch.randn(len(images), 3, 8, 8),
                   "sample_index": torch.tensor(images)},
    }


def metadata(step):
    return describe_microbatches(
        [complete_microbatch(microbatch, ("vision",)) for microbatch in step], ("vision",)
    )[1]


@pytest.mark.parametrize(
    "vision, projector, llm, lora",
    [(*flags, None) for flags in list(itertools.product([False, True], repeat=3))[:-1]]
    + [(True, False, False, LoraConfig(r=3)), (False, False, False, LoraConfig(targets=".*_proj"))],
)
def test_step_flops_equal_torch_for_any_frozen_modules(vision, projector, llm, lora):
    model = described(vision, projector, llm, lora=lora)
    check_against_torch(model, backward=not (vision and projector and llm))


def test_step_flops_equal_torch_for_frozen_leading_blocks():
    model = described()
    for name, parameter in model.encoders["vision"].module.named_parameters():
        if "embeddings" in name or "layers.0." in name:
            parameter.requires_grad_(False)
    check_against_torch(model)


def check_against_torch(model, backward=True):
    """Use rows of one length.

    Eager attention also computes masked pairs, so invisible pairs are the whole difference, with
    the rotary table and the loss's own head on rows without a label.
    """
    step = [batch([7, 7], [0, 1]), batch([5, 5, 5], [0, 1, 2])]
    counted = StepFlops(model).of(metadata(step))
    total = 0.0
    for microbatch in step:
        with FlopCounterMode(display=False) as counter:
            model(**microbatch).backward()
        total += counter.get_total_flops()
    masked = 0.0
    for microbatch in step:
        rows, text = microbatch["input_ids"].shape
        length = text + 4  # an image's tokens
        masked += 3 * rows * (length * (length - 1) // 2) * 2 * (48 + 48) * (1 + 2 * backward)
    assert sum(counted.values()) + masked == pytest.approx(total, rel=1e-12)


def test_scans_of_state_spaces_count_per_token():
    config = hf.Mamba2Config(
        hidden_size=48, num_hidden_layers=2, vocab_size=64, num_heads=6, head_dim=16,
        state_size=16, n_groups=1, chunk_size=64,
    )
    model, tokens = hf.Mamba2ForCausalLM(config), 256
    with FlopCounterMode(display=False, custom_mapping=CUSTOM_FLOPS) as counter:
        model(torch.zeros(1, tokens, dtype=torch.int64)).logits.sum().backward()
    flops = module_flops(model, causal=True)
    counted = (flops.per_token + flops.per_label) * tokens + flops.per_sample
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("mask", [None, "causal", "multimodal", "causal_with_own_image"])
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_pairs_equal_the_masks_visible_pairs(mask, replaced, window):
    """Use rows of different lengths with no, one and two items, text between and around them."""
    config = hf.MistralConfig(**LLAMA, sliding_window=window)
    merge = ReplaceTokens({"vision": IMAGE}) if replaced else None
    model = described(config=config, merge=merge, mask=mask)
    image = [IMAGE] * 4
    rows = [[5, *image, 5, 5, *image, *image, 5], [5, 5, 5], [*image, 5, 5]]
    images, width = [0, 0, 0, 2], 16
    if not replaced:
        rows = [[5] * 7, [5] * 3, [5] * 2]
    lengths = [len(row) for row in rows]
    ids = [row + [0] * (width - len(row)) for row in rows]
    microbatch = complete_microbatch(batch(lengths, images, width, ids), ("vision",))
    meta = describe(dict(microbatch), ["a", "b", "c"], {"vision": IMAGE} if replaced else None)
    flops = StepFlops(model)
    per_pair = flops._flops["llm"].per_pair
    assert set(per_pair) == {window}
    other = flops.of([meta])["llm"] - per_pair[window] * visible_pairs(model, rows, images, window)
    language = flops._flops["llm"]
    tokens = sum(lengths) + (0 if replaced else 4 * len(images))
    assert other == pytest.approx(
        language.per_token * tokens + language.per_label * meta.label_tokens, rel=1e-12
    )


def visible_pairs(model, rows, images, window):
    """Count in dense masks."""
    total = 0
    for number, row in enumerate(rows):
        kinds = [int(token == IMAGE) for token in row]
        if IMAGE not in sum(rows, []):
            kinds = [1] * (4 * images.count(number)) + kinds
        items, seen = [], 0
        for kind in kinds:
            seen += kind
            items.append((seen - 1) // 4 + 1 if kind else 0)
        T = len(kinds)
        q, k = np.arange(T)[:, None], np.arange(T)[None]
        own = np.array(items)[:, None] == np.array(items)[None]
        image = np.array(kinds, bool)
        near = q - k < (window or T)
        visible, policy = (q >= k) & near, getattr(model.mask, "__name__", None)
        if policy == "multimodal":
            visible = np.where(image[:, None], image[None] & near, visible)
        elif policy == "causal_with_own_image":  # a window limits the past, not the image
            visible = visible | (own & image[:, None] & image[None])
        total += int(visible.sum())
    return total




@pytest.mark.parametrize("window", [None, 6])
def test_loads_have_the_flops_of_equal_microbatches(window):
    """Two rows of ten tokens with a label each, and an image of four tokens in each row."""
    config = hf.LlamaConfig(**LLAMA) if window is None else hf.MistralConfig(
        **LLAMA, sliding_window=window
    )
    counter = StepFlops(described(vision=True, config=config))
    [meta] = metadata([batch([10, 10], [0, 1])])
    length = 10 + 4  # items come first
    loads = {"vision": Load(2, 4), "llm": Load(2, length, meta.label_tokens)}
    assert counter.of_loads(loads) == pytest.approx(sum(counter.of([meta]).values()), rel=1e-12)
