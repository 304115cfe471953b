"""Builders of stages: owned parameters, shared builders, and what a plan may not split."""

import pickle

import pytest
import torch
from torch import nn

from raymm.errors import PlanError
from raymm.layout.stage_builders import parameter_sizes, skeletons, stage_builders
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.plan.stage import StageId
from tests.support import parity_models as pm


def model_of(encoder=None, **options):
    vision = ModalityModule(encoder or pm.siglip(), "mlp", **options)
    return MultimodalModule({"vision": vision}, ModalityModule(pm.llama()))


def plan_of(model, vision=None, llm=None, microbatches=2):
    return MultimodalParallelSpec(
        {"vision": vision or ParallelSpec()}, llm or ParallelSpec(), microbatches
    ).plan(model)


def test_stages_own_every_trained_parameter_and_tied_ones_twice():
    model = model_of(frozen=True)
    builders = stage_builders(model, plan_of(model, llm=ParallelSpec(pp=3)))
    spec = model.language_spec()
    sizes = parameter_sizes(spec)
    owned = [builders.owned[StageId("llm", index)] for index in range(3)]
    assert {name: size for stage in owned for name, size in stage.items()} == sizes
    shared = [name for name in sizes if sum(name in stage for stage in owned) > 1]
    assert shared == ["module.model.embed_tokens.weight"]  # tied to the head
    vision = builders.owned[StageId("vision", 0)]
    assert {size for name, size in vision.items() if name.startswith("module.")} == {0}
    assert all(size for name, size in vision.items() if name.startswith("projector."))


def test_a_built_stage_holds_the_parameters_that_it_owns():
    model = model_of()
    builders = stage_builders(model, plan_of(model, ParallelSpec(pp=2, layers=(2, 1))))
    for index, part in enumerate(("module", "projector")):
        stage = StageId("vision", index)
        built = pickle.loads(pickle.dumps(builders.build[stage]))()
        held = {f"{part}.{name}": p.numel() for name, p in getattr(built, part).named_parameters()}
        assert held == builders.owned[stage]


def test_replicas_share_a_builder():
    model = model_of()
    builders = stage_builders(model, plan_of(model, ParallelSpec(dp=2)))
    first, second = (builders.build[StageId("vision", 0, replica)] for replica in range(2))
    assert first is second


def test_structures_are_named_by_the_prefix_of_their_parameters():
    model = model_of()
    assert list(skeletons(model.encoder_spec("vision"))) == ["module", "projector"]
    assert list(skeletons(model.language_spec())) == ["module"]


def test_shards_follow_the_degrees_of_a_module():
    model = model_of()
    plan = plan_of(model, ParallelSpec(tp=2), ParallelSpec(dp=2, sharding="fsdp"))
    shards = stage_builders(model, plan).shard_specs
    assert set(shards["vision"].plans) == {"module", "projector"}
    assert set(shards["llm"].plans) == {"module"}
    unsplit = stage_builders(model, plan_of(model)).shard_specs
    assert not unsplit["vision"].plans and not unsplit["llm"].plans


class Norms(nn.Module):
    """Encoder with a batch norm and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x[:, None]


@pytest.mark.parametrize(("frozen", "refused"), [(False, True), (True, False)])
def test_batch_norms_that_train_need_all_samples(frozen, refused):
    model = model_of(
        Norms(), frozen=frozen, hidden_size=5, example_inputs={"x": torch.ones(2, 5)}
    )
    plan = plan_of(model, ParallelSpec(dp=2, sharding="fsdp"))
    if refused:
        with pytest.raises(PlanError, match="sharding of 'vision' is 'fsdp'.*batch norms"):
            stage_builders(model, plan)
    else:
        stage_builders(model, plan)


def test_modules_without_blocks_are_not_sharded():
    model = model_of(nn.Linear(5, 7), hidden_size=7, example_inputs={"input": torch.ones(2, 1, 5)})
    with pytest.raises(PlanError, match="no list of blocks to shard was found"):
        stage_builders(model, plan_of(model, ParallelSpec(dp=2, sharding="fsdp")))
