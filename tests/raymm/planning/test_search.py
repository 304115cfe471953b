"""The search for a pipelined plan."""

import pytest
import torch
from torch import nn

import raymm
from raymm.errors import NoPlanError, PlanError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.planning.search import cut_modules, refused_cuts
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.costs.layer_costs import LayerCost
from raymm.scheduler.costs.profile_table import Measurement, ProfileTable
from tests.support import parity_models as pm


@pytest.fixture(scope="module")
def model():
    return MultimodalModule(
        {"vision": ModalityModule(pm.siglip(), "mlp")}, ModalityModule(pm.llama())
    )


def search(model, ranks, **options):
    return raymm.plan(
        model, ranks=ranks, microbatches=4, device="H100", tokens={"llm": 64}, **options
    )


def test_more_devices_give_faster_plans(model):
    """Layers take a second each, far more than messages between devices."""
    layer = LayerCost(1.0, 1.0, 1.0)
    layers = {node.name: node.num_layers for node in model.graph.nodes}
    table = ProfileTable(
        {name: (Measurement(64, 1, (layer,) * count),) for name, count in layers.items()},
        dict.fromkeys(layers, 64), "H100", "bf16", {}, "",
    )
    seconds = [
        raymm.plan(model, ranks=ranks, microbatches=4, profile=table).proposal.best.seconds
        for ranks in (1, 2, 3)
    ]
    # The first layer returns no gradient.
    assert seconds[0] == pytest.approx(4 * (3 * sum(layers.values()) - 1))
    assert seconds[0] > seconds[1] > seconds[2] >= seconds[0] / 3


def test_a_plan_uses_the_given_schedules_and_microbatches(model):
    plan = search(model, 3, schedules=("gpipe",)).plan
    assert plan.schedule == "gpipe" and plan.num_microbatches == 4 and plan.num_ranks <= 3


def test_too_little_memory_is_answered_with_adapters(model):
    with pytest.raises(NoPlanError, match="raymm train --lora, or model.language_model.train"):
        search(model, 2, memory_gib=1e-6)
    adapted = MultimodalModule(
        {}, ModalityModule(pm.llama(), lora=raymm.LoraConfig(r=2))
    )
    with pytest.raises(NoPlanError) as refused:
        search(adapted, 2, memory_gib=1e-6)
    assert "--lora" not in str(refused.value)


def test_unknown_options_and_degrees_are_named(model):
    with pytest.raises(TypeError, match="unknown planning option 'rank'; accepted: "):
        search(model, 2, rank=3)
    with pytest.raises(PlanError, match="audio"):
        search(model, 2, degrees=("audio.tp=2",))


def test_a_projector_alone_on_a_stage_is_no_cut(model):
    blocks = model.graph.node("vision").num_blocks
    apart = MultimodalParallelSpec({"vision": ParallelSpec(pp=2, layers=(blocks, 1))}).plan(model)
    assert cut_modules(apart) == []
    cut = MultimodalParallelSpec(
        {"vision": ParallelSpec(pp=2, layers=(1, blocks))}, ParallelSpec(pp=2)
    ).plan(model)
    assert cut_modules(cut) == ["vision", "llm"]


class Backwards(nn.Module):
    """Encoder whose blocks do not run in the order of their list."""

    def __init__(self) -> None:
        super().__init__()
        width = pm.llama().hidden_size
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def test_modules_that_the_probe_cannot_cut_have_a_reason(model):
    assert refused_cuts(model, ["vision", "llm"]) == {}
    width = pm.llama().hidden_size
    encoder = ModalityModule(
        Backwards(), hidden_size=width, example_inputs={"x": torch.ones(2, 5, width)}
    )
    odd = MultimodalModule({"vision": encoder}, ModalityModule(pm.llama()))
    assert set(refused_cuts(odd, ["vision", "llm"])) == {"vision"}
