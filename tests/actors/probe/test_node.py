"""Probe of a graph's modules by all of their outputs."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, SiglipVisionConfig

import raymm
from raymm.actors.modules.message import first_tensor
from raymm.actors.probe.callbacks import Cuts
from raymm.actors.probe.node import probe_node, read_of
from raymm.errors import ProbeError
from raymm.model.dag_module import DagLoss, DagModule, every
from raymm.model.module_dag import ModuleDag

CUT = Cuts(True, False)


class Mean(nn.Module):
    """Loss of each sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1).mean(1)


class Blocks(nn.Module):
    """Blocks that read all samples of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])

    def forward(self, x: torch.Tensor, own: slice | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if own is None else x[own]


def dag() -> ModuleDag:
    config = SiglipVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        image_size=8, patch_size=4,
    )
    return ModuleDag({
        "image": DagModule(
            config, reads="pixel_values", outputs=("last_hidden_state", "pooler_output"),
        ),
        "blocks": DagModule(
            Blocks(), inputs={"x": every("image.pooler_output")}, outputs=("x",), draws=False
        ),
        "loss": DagLoss(Mean(), inputs={"x": "image.last_hidden_state"}),
        "other": DagLoss(Mean(), inputs={"x": "blocks.x"}),
    })


def test_a_module_is_probed_by_all_of_its_outputs() -> None:
    """Outputs without blocks before them count, too: the read function concatenates them."""
    spec = dag().spec("image")
    probed = probe_node(spec, CUT)
    assert probed.cut is not None and probed.cut.blocks == "encoder.layers"
    assert probe_node(spec, Cuts(False, False)) is spec
    output = spec.source.build()(torch.randn(2, 3, 8, 8))
    read = read_of(spec)(output)
    assert spec.node is not None
    assert set(spec.node.outputs) == {"last_hidden_state", "pooler_output"}
    parts = [output[name] for name in spec.node.outputs]
    assert torch.equal(read, torch.cat([part.reshape(-1) for part in parts]))


def test_a_module_without_named_outputs_is_read_as_one_tensor() -> None:
    spec = raymm.MultimodalModule({}, LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=32,
    )).language_spec()  # fmt: skip
    assert read_of(spec) is first_tensor


def test_a_module_that_reads_all_samples_is_not_cut() -> None:
    with pytest.raises(ProbeError, match=r"'blocks' reads every\(\) of 'image'.* one stage"):
        probe_node(dag().spec("blocks"), CUT)
