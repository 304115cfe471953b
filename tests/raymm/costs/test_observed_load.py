"""Counted FLOPs of VLM towers equal torch's counter for the tower's own computation."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import runnable
from benchmarks.vlm_matrix import KIND
from raymm.costs.layer_count import count_layers
from raymm.costs.observed_load import observe
from raymm.costs.workload import microbatch_workload
from raymm.model.vlm import from_pretrained

# Relative to all FLOPs; attention is counted in pairs, and these images are tiny.
TOLERANCE = 0.1


@pytest.mark.cells(3)
@pytest.mark.parametrize(
    "name",
    [
        "GlmAsrForConditionalGeneration",  # convolutions, one of them with a stride
        "Gemma3ForConditionalGeneration",  # a config of parts does not contain an image's tokens
        "DeepseekVLHybridForConditionalGeneration",  # two encoders with many convolutions
        "Idefics3ForConditionalGeneration",  # cannot run without values
    ],
)
def test_a_towers_flops_equal_its_forward(name):
    model_class = getattr(transformers, name)
    config, (microbatch, *_) = runnable(Family(KIND, model_class, model_class.config_class))
    config.architectures = [name]
    model = from_pretrained(config, microbatch)
    (tower,) = model.towers
    source = model.tower_spec(tower.name).source
    load = microbatch_workload(model, microbatch).by_module[tower.name]
    layers = count_layers(source.skeleton(), load)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        source.build().eval()(**(tower.inputs(microbatch) or {}), **dict(tower.constants))
    counted = sum(layer.matmul_flops + layer.attention_flops for layer in layers)
    assert counted == pytest.approx(counter.get_total_flops(), rel=TOLERANCE)


def tiny_qwen(windows: bool) -> transformers.PreTrainedModel:
    """Return a tower for images of native sizes, with or without windows of attention."""
    sizes = dict(depth=4, num_heads=4, patch_size=4, temporal_patch_size=2)
    torch.manual_seed(0)
    if windows:
        config = transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
            **sizes, hidden_size=64, intermediate_size=160, out_hidden_size=96, window_size=32,
            fullatt_block_indexes=[1],
        )
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as models

        return models.Qwen2_5_VisionTransformerPretrainedModel(config)
    config = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(
        **sizes, hidden_size=96, embed_dim=64, mlp_ratio=2
    )
    from transformers.models.qwen2_vl import modeling_qwen2_vl as models

    return models.Qwen2VisionTransformerPretrainedModel(config)


GRIDS = st.lists(
    st.tuples(st.integers(1, 2), st.sampled_from([4, 8, 14]), st.sampled_from([4, 10])),
    min_size=1, max_size=3,
)


@settings(max_examples=4, deadline=None)
@given(GRIDS, st.booleans())
def test_native_size_towers_attend_within_items_and_windows(grids, windows):
    module = tiny_qwen(windows).eval()
    # torch's counter does not support the CPU's flash attention
    module.set_attn_implementation("eager")
    patches = sum(t * h * w for t, h, w in grids)
    inputs = {"hidden_states": torch.randn(patches, 96), "grid_thw": torch.tensor(grids)}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(**inputs)
    (seen,) = observe(module, inputs, module)
    load = seen.load()
    layers = count_layers(module, load)
    counted = sum(layer.matmul_flops + layer.attention_flops for layer in layers)
    assert counted == counter.get_total_flops()
    assert (load.total, layers[0].output_elements) == (patches, patches * 64)


def test_cross_attention_counts_keys_of_the_other_modality():
    """Count FLOPs, and bytes of keys and values, of a language model that attends to features."""
    name = "MllamaForConditionalGeneration"
    model_class = getattr(transformers, name)
    config, (microbatch, *_) = runnable(Family(KIND, model_class, model_class.config_class))
    config.architectures = [name]
    model = from_pretrained(config, microbatch)
    load = microbatch_workload(model, microbatch).by_module["llm"]
    source = model.language_spec().source
    layers = count_layers(source.skeleton(), load, causal=True)
    text = config.get_text_config()
    width = text.hidden_size // text.num_attention_heads
    crossed = text.cross_attention_layers[0]
    keys = dict(load.attention)[
        next(name for name, _ in load.attention if f".{crossed}." in name)
    ].keys * load.total
    tiles = microbatch["pixel_values"].shape[1:3].numel() * len(microbatch["pixel_values"])
    patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2 + 1
    assert keys == pytest.approx(tiles * patches)
    layer = layers[crossed]
    assert layer.key_value_elements == pytest.approx(
        2 * keys * text.num_key_value_heads * width
    )
    # Every text token sees the patches that the mask of its row allows, at most all of its row.
    most = load.tokens * keys * 4 * text.hidden_size
    assert 0 < layer.attention_flops <= most * (1 + 1e-9)
