"""Choice and description of a run's plan."""

import pytest
from transformers import LlamaConfig, SiglipVisionConfig

import raymm
from raymm.actors.placement.placement import PlacementOptions
from raymm.data import DataConfig, ModalityDataConfig
from raymm.training.run_plan import RunPlanner, plan_lines

SIZES = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2)


def model(layers: int = 3) -> raymm.MultimodalModule:
    vision = raymm.ModalityModule(
        SiglipVisionConfig(image_size=16, patch_size=8, num_hidden_layers=2, **SIZES), "mlp"
    )
    return raymm.MultimodalModule(
        {"vision": vision}, LlamaConfig(vocab_size=64, num_hidden_layers=layers, **SIZES)
    )


def plan(tp: int = 1, microbatches: int = 2) -> raymm.Plan:
    spec = raymm.MultimodalParallelSpec(
        {"vision": raymm.ParallelSpec()}, raymm.ParallelSpec(pp=2, tp=tp), microbatches
    )
    return spec.plan(model())


@pytest.mark.parametrize(("made", "line"), [
    (plan(), "3 stages on 3 ranks (cpu), 2 microbatches per step"),
    (plan(tp=2, microbatches=1), "3 stages on 3 ranks (5 processes, cpu), 1 microbatch per step"),
])  # fmt: skip
def test_a_plan_is_described_in_one_line(made, line) -> None:
    assert plan_lines(made, "cpu") == [line]


@pytest.mark.parametrize(("described", "microbatches", "words"), [
    (model(4), 2, "the checkpoint's plan is for a different model"),
    (model(), 3, "the checkpoint's plan has 2 microbatches, but data.microbatches is 3"),
])  # fmt: skip
def test_a_plan_of_another_run_is_not_kept(described, microbatches, words) -> None:
    data = DataConfig(
        train=["rows.jsonl"], tokenizer="folder", batch_size=6, microbatches=microbatches,
        modalities={"vision": ModalityDataConfig(processor="folder", column="image")},
    )
    planner = RunPlanner(
        raymm.PlanRequest(), described, data, "fp32", raymm.OptimizerConfig(), print
    )
    reason = planner._cannot_keep(plan(), raymm.RankResources(), PlacementOptions())
    assert reason is not None and words in reason
