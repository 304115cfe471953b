"""Plans that do not fit their model, optimizer or compilation are refused by name."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, MixtralConfig

import raymm
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.errors import PlanError
from raymm.layout.plan_check import check_groups, check_optimizer, differences
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec, dag_plan, vlm_plan
from raymm.scheduler.costs.layer_costs import LayerCost
from raymm.scheduler.costs.profile_table import Measurement, ProfileTable
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan
from tests.parity.test_vlms_on_ray import whole
from tests.support import parity_models as pm
from tests.support.graph_models import reading
from tests.support.stage_hooks import Squashed


def graph(vision=(False, True), llm=(True, True), projector=True):
    return ModuleGraph(
        (ModuleNode("vision", vision, projector), ModuleNode("llm", llm)), (("vision", "llm"),)
    )


def test_equal_graphs_have_no_difference():
    assert differences(graph(), graph()) == []


@pytest.mark.parametrize(("model", "text"), [
    (ModuleGraph((ModuleNode("llm", (True, True)),), ()),
     "the plan has a module 'vision', the model does not"),
    (graph(llm=(True,) * 3), "'llm' has 2 blocks in the plan, 3 in the model"),
    (graph(llm=(True, False)), "layer 1 of 'llm' is trained in the plan, frozen in the model"),
])
def test_a_difference_names_module_and_values(model, text):
    assert text in differences(graph(), model)


def test_a_projector_is_missing_on_one_side():
    bare = graph(vision=(False,), projector=False)
    assert differences(graph(), bare) == ["'vision' has a projector in the plan only"]
    assert differences(bare, graph()) == ["'vision' has a projector in the model only"]


SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 64,
}  # fmt: skip


def refusal(spec: MultimodalParallelSpec, config=None, **options) -> str:
    model = MultimodalModule(
        language_model=ModalityModule(config or LlamaConfig(**SIZES)), mask="causal",
        router_loss="ignore",
    )
    with pytest.raises(PlanError) as raised:
        spec.apply(model, compile="blocks", **options)
    return str(raised.value)


@pytest.mark.parametrize("spec, said", [
    (ParallelSpec(tp=2), "'llm' has tp 2; accepted: tp 1, or compile null"),
    (ParallelSpec(cp=2), "'llm' has cp 2; accepted: cp 1, or compile null"),
    (ParallelSpec(dp=2, sharding="fsdp"), "'llm' has fsdp 2; accepted: fsdp 1"),
    (ParallelSpec(recompute_layers="matmuls"),
     "'llm' has recompute_layers 'matmuls', which selects operators .*; accepted: keep or all"),
])  # fmt: skip
def test_degrees_and_recomputation_are_refused(spec, said):
    assert re.search(said, refusal(MultimodalParallelSpec({}, spec, 2)))


def test_schedules_kernels_and_mixtures_are_refused():
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=2), 2, schedule="zero_bubble")
    assert "schedule 'zero_bubble', which splits the backward" in refusal(spec)
    assert "run.kernels 'auto', which measures" in refusal(MultimodalParallelSpec(), kernels="auto")
    config = MixtralConfig(**SIZES, num_local_experts=2)
    said = refusal(MultimodalParallelSpec(), config)
    assert "'llm' is a mixture of experts; accepted: a dense model" in said


def test_other_values_are_refused():
    with pytest.raises(ValueError, match="compile is 'all'; accepted: blocks, or null"):
        RuntimeOptions(compile="all")


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


def check_rules(spec=None, bf16=True, **fields):
    model = model_of()
    plan = MultimodalParallelSpec({}, spec or ParallelSpec()).plan(model)
    check_optimizer(OptimizerConfig(**fields), plan, bf16)


@pytest.mark.parametrize(("spec", "bf16", "fields", "expected"), [
    (None, True, {"modules": {"text": {"lr": 0.1}}},
     "optimizer.modules has 'text'; the model's modules are vision, llm, vision_projector"),
    (None, False, {"parameters": "bf16_master"},
     "optimizer.parameters is 'bf16_master', and run.precision 'fp32'"),
    (ParallelSpec(dp=2, sharding="fsdp"), True, {"parameters": "bf16_master"},
     "sharding of 'llm' is 'fsdp', which already gathers weights in bf16"),
    (ParallelSpec(tp=2), True, {"name": "muon"},
     "tp of 'llm' is 2, under which no process has a full matrix, and its optimizer is 'muon'"),
    (ParallelSpec(dp=2, sharding="fsdp"), True, {"name": "muon"},
     "sharding of 'llm' is 'fsdp', .* accepted: sharding zero1, or adamw"),
])  # fmt: skip
def test_optimizers_that_a_plan_does_not_support_are_refused(spec, bf16, fields, expected):
    with pytest.raises(PlanError, match=expected):
        check_rules(spec, bf16, **fields)


def test_optimizers_of_whole_matrices_run_under_zero1():
    check_rules(ParallelSpec(sharding="zero1"), name="muon", parameters="bf16_master")
    check_rules(ParallelSpec(tp=2))
