"""Specs of the processes of a plan, without Ray."""

import pickle
from pathlib import Path

import pytest

from raymm.actors.features.feature_folder import FeatureFolder
from raymm.layout.rank_specs import rank_specs
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.plan.stage import StageId
from tests.raymm.layout.test_stage_builders import model_of


@pytest.fixture(scope="module")
def split():
    """Return the specs of two replicas of an encoder, and a language model of 2 x 2 processes."""
    model = model_of()
    plan = MultimodalParallelSpec(
        {"vision": ParallelSpec(dp=2, sharding="zero1")}, ParallelSpec(pp=2, tp=2), 2
    ).plan(model)
    return plan, rank_specs(model, plan, autocast="bfloat16")


def test_every_process_has_a_spec_with_its_number(split):
    plan, ranks = split
    assert len(ranks.specs) == plan.num_processes == 2 + 2 * 2
    assert [spec.rank for spec in ranks.specs] == list(range(6))
    assert {spec.world_size for spec in ranks.specs} == {6}
    assert {spec.autocast for spec in ranks.specs} == {"bfloat16"}


def test_a_process_builds_the_stages_of_its_rank_only(split):
    plan, ranks = split
    for process, spec in zip(ranks.processes.all, ranks.specs, strict=True):
        stages = {stage.id for stage in plan.rank_stages(process.rank)}
        assert set(spec.builders) == stages
        assert all(set(edge) & stages for edge in spec.edges)
        assert {edge for edge in plan.stage_edges if set(edge) & stages} == set(spec.edges)
        pickle.dumps(spec)


def test_groups_of_one_process_are_left_out(split):
    _, ranks = split
    vision, llm = ranks.specs[0].process_groups, ranks.specs[2].process_groups
    assert sorted(llm.tensors) == sorted(llm.rank) and len(llm.tensors) == 2
    assert vision.tensors == vision.rank == ()


def test_the_first_process_of_a_rank_writes_features():
    model = model_of(frozen=True)
    plan = MultimodalParallelSpec(
        {"vision": ParallelSpec(dp=2)}, ParallelSpec(), 2
    ).plan(model)
    folder = FeatureFolder(Path("/features"), room=10)
    ranks = rank_specs(model, plan, {"vision": folder})
    written = [spec.features for spec in ranks.specs]
    assert [list(one) for one in written] == [
        [StageId("vision", 0, 0)], [StageId("vision", 0, 1)], [],
    ]
    assert [f.room for one in written for f in one.values()] == [5, 5]  # shared by replicas
