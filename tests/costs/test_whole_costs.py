"""Counted FLOPs of whole models' towers against torch's own counter, on what the tower itself
computes of a microbatch."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks._family_classes import Family
from benchmarks._vlm_check import runnable
from benchmarks.vlm_matrix import KIND
from raymm.costs.layer_count import count_layers
from raymm.costs.workload import microbatch_workload
from raymm.model.whole_model import from_pretrained

# Of all; attention is counted in pairs, and these images are tiny.
TOLERANCE = 0.1


@pytest.mark.parametrize(
    "name",
    [
        "Gemma3ForConditionalGeneration",  # a config of parts does not say an image's tokens
        "GlmAsrForConditionalGeneration",  # convolutions, of which one reduces
        "DeepseekVLHybridForConditionalGeneration",  # two encoders, whose convolutions are many
        "Idefics3ForConditionalGeneration",  # does not run without values
    ],
)
def test_a_towers_flops_are_those_of_its_forward(name):
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
