"""A run reports the numbers that depend on its layout."""

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from raymm.actors.adapters.lora_config import LoraConfig
from raymm.layout.layout_notes import layout_notes
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec


def notes(layout, frozen=None, lora=None, device="cuda", **config):
    llm = hf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64, **config,
    )
    model = MultimodalModule({}, ModalityModule(llm, frozen=frozen, lora=lora))
    plan = MultimodalParallelSpec({}, layout, 2).plan(model)
    return list(layout_notes(model, plan, device))


SHARED = [
    (ParallelSpec(tp=2), "tp 2"), (ParallelSpec(cp=2), "cp 2"),
    (ParallelSpec(dp=2, sharding="fsdp"), "fsdp 2"),
]


@pytest.mark.parametrize(("layout", "shown"), SHARED)
def test_attention_dropout_of_gpu_kernels(layout, shown):
    (line,) = notes(layout, attention_dropout=0.1)
    assert f"with {shown}, attention kernels of llm draw other dropout masks" in line
    assert notes(layout, attention_dropout=0.1, device="cpu") == []
    assert notes(layout, attention_dropout=0.1, attn_implementation="eager") == []
    assert notes(layout) == notes(layout, lora=LoraConfig(r=2, dropout=0.1)) == []
    assert notes(layout, attention_dropout=0.1, frozen=True) == []
    assert notes(ParallelSpec(pp=2), attention_dropout=0.1) == []


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Flatten(), norm)

    def forward(self, pixel_values):
        return self.layer(pixel_values)[:, None]


@pytest.mark.parametrize(("norm", "frozen", "replicas", "is_noted"), [
    (nn.BatchNorm1d(4), False, 2, True),
    (nn.BatchNorm1d(4), True, 2, False),
    (nn.BatchNorm1d(4), False, 1, False),
    (nn.BatchNorm1d(4, track_running_stats=False), False, 2, False),
    (spectral_norm(nn.Linear(4, 4)), False, 2, True),
    (nn.LayerNorm(4), False, 2, False),
])  # fmt: skip
def test_running_statistics_of_replicas(norm, frozen, replicas, is_noted):
    vision = ModalityModule(
        Normed(norm), "linear", hidden_size=4, frozen=frozen,
        example_inputs={"pixel_values": torch.ones(2, 4)},
    )
    llm = hf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64,
    )
    model = MultimodalModule({"vision": vision}, ModalityModule(llm))
    spec = MultimodalParallelSpec({"vision": ParallelSpec(dp=replicas)}, ParallelSpec(), 2)
    lines = list(layout_notes(model, spec.plan(model), "cpu"))
    assert len(lines) == is_noted
    if lines:
        assert "each of the 2 replicas of vision updates " in lines[0]
        batch_norm = isinstance(norm, nn.BatchNorm1d)
        assert ("training matches one process" in lines[0]) == batch_norm
        assert ("similar to those of one process" in lines[0]) != batch_norm
        assert "set dp of vision to 1, or freeze it" in lines[0]
