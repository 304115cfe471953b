"""Modules that cannot share a forward of several microbatches are refused before actors start."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import raymm
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.errors import PlanError
from raymm.layout.group_check import check_groups
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec, dag_plan, vlm_plan
from raymm.scheduler.costs.layer_costs import LayerCost
from raymm.scheduler.costs.profile_table import Measurement, ProfileTable
from raymm.scheduler.plan.plan import Plan
from tests.parity.test_vlms_on_ray import whole
from tests.support import parity_models as pm
from tests.support.graph_models import reading
from tests.support.stage_hooks import Squashed

WIDTH = pm.llama().hidden_size


class Noisy(nn.Linear):
    """Encoder that draws numbers without any dropout layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)[:, None]
        return hidden + torch.randn_like(hidden) if self.training else hidden


class Norms(nn.Module):
    """Encoder with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(5), nn.Linear(5, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))[:, None]


def model_of(encoder=None, projector=None, **options) -> MultimodalModule:
    if encoder is None:
        encoder = pm.siglip()
    else:
        options |= {"hidden_size": WIDTH, "example_inputs": {"x": torch.ones(2, 5)}}
    vision = ModalityModule(encoder, projector or "mlp", **options)
    return MultimodalModule({"vision": vision}, ModalityModule(pm.llama()))


def check(model: MultimodalModule, factor: int = 2, **options) -> None:
    vision = ParallelSpec(microbatch_factor=factor)
    plan = MultimodalParallelSpec({"vision": vision}, ParallelSpec(), 4).plan(model)
    ParallelModel.check_plan(model, plan, RuntimeOptions(**options))


@pytest.mark.parametrize(("options", "reason"), [
    ({"encoder": Noisy(5, WIDTH), "frozen": False}, "random numbers"),
    ({"encoder": Norms(), "frozen": False}, "batch norms"),
    ({"projector": nn.Sequential(nn.Dropout(0.1), nn.Linear(24, WIDTH))}, "random numbers"),
    ({"lora": LoraConfig(r=2, dropout=0.1)}, "random numbers"),
    ({"preprocess_callback": dict}, "callbacks"),
])
def test_modules_that_mix_microbatches_are_refused(options, reason):
    model = model_of(**options)
    check(model, 1)
    with pytest.raises(PlanError, match=f"microbatch_factor of 'vision' is 2.*{reason}"):
        check(model)


@pytest.mark.parametrize("frozen", [False, True])
def test_dropout_of_a_config_is_refused_only_in_training(frozen):
    config = pm.siglip()
    config.attention_dropout = 0.1
    model = MultimodalModule(
        {"vision": ModalityModule(config, "mlp", frozen=frozen)}, ModalityModule(pm.llama())
    )
    with nullcontext() if frozen else pytest.raises(PlanError, match="random numbers"):
        check(model)


def test_frozen_batch_norms_are_accepted():
    check(model_of(Norms(), frozen=True))


def test_cached_features_and_hooks_are_refused():
    model = model_of()
    with pytest.raises(PlanError, match="cached features"):
        check(model, features={"vision": None})
    model.add_stage_hook("vision", Squashed())
    with pytest.raises(PlanError, match="hooks"):
        check(model)


def test_a_graph_node_is_refused():
    dag = reading()
    source = next(n for n in dag.nodes if all(consumer != n for _, consumer in dag.graph.edges))
    plan = dag_plan(dag, {source: ParallelSpec(microbatch_factor=2)}, 4)
    with pytest.raises(PlanError, match="must be an encoder of a MultimodalModule"):
        check_groups(dag, plan)


def test_a_tower_that_leaves_out_padding_is_refused():
    model, microbatches = whole("Idefics3ForConditionalGeneration")
    plan = vlm_plan(model, {"vision": ParallelSpec(microbatch_factor=2)}, 2)
    with pytest.raises(PlanError, match="padding items"):
        ParallelModel.check_plan(model, plan, RuntimeOptions())


def launch_bound(model: MultimodalModule) -> ProfileTable:
    """Return measurements in which the encoder takes as long for one item as for twice as many."""
    layers = {
        node.name: (LayerCost(*(seconds,) * 3),) * node.num_layers for node in model.graph.nodes
        for seconds in (1e-2 if node.name == "vision" else 1e-3,)
    }
    return ProfileTable(
        {name: (Measurement(8, 1, costs), Measurement(16, 2, costs))
         for name, costs in layers.items()},
        dict.fromkeys(layers, 8),
    )


@pytest.mark.parametrize(("encoder", "factor"), [(None, 2), (Noisy(5, WIDTH), 1)])
def test_plans_share_forwards_of_modules_that_allow_it(encoder, factor):
    model = model_of(encoder, frozen=False)
    planned = raymm.plan(model, ranks=2, microbatches=4, profile=launch_bound(model))
    chosen = planned.plan
    assert chosen.module_stages("vision")[0].microbatch_factor == factor
    assert ("2 microbatches per forward" in planned.explain()) == (factor > 1)
    ParallelModel.check_plan(model, chosen, RuntimeOptions())
    assert Plan.from_json(chosen.to_json()) == chosen
