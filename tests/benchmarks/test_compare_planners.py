"""The comparison of raymm's plan with plans of other planners."""

from __future__ import annotations

from transformers import LlamaConfig, SiglipVisionConfig

from benchmarks import compare_planners
from benchmarks.baselines.mappings import MAPPINGS
from benchmarks.baselines.pipelines import PIPELINES
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.planning.inputs import PlanInputs
from raymm.planning.request import PlanRequest, Workload
from raymm.planning.search import search_pipelines
from raymm.scheduler.search.evaluation import Option

LAYERS = dict(hidden_size=64, num_attention_heads=4, intermediate_size=128)


def tiny_model() -> MultimodalModule:
    vision = SiglipVisionConfig(num_hidden_layers=3, image_size=28, patch_size=14, **LAYERS)
    return MultimodalModule(
        {"vision": ModalityModule(vision, "mlp")},
        LlamaConfig(num_hidden_layers=4, vocab_size=100, **LAYERS),
    )


def test_other_planners_are_never_better() -> None:
    request = PlanRequest(
        ranks=3,
        device="H100",
        tokens={"llm": 64},
        layouts=("modality_parallel",),
        schedules=("1f1b",),
    )
    inputs = PlanInputs.of(tiny_model(), request, Workload(4, 2, dtype="bf16"))
    planned = search_pipelines(inputs)
    others = compare_planners.other_pipelines(planned)
    assert list(others) == [baseline.name for baseline in PIPELINES]
    found = [other for other in others.values() if isinstance(other, Option)]
    assert len(found) == len(PIPELINES)
    assert all(other.seconds >= planned.seconds * (1 - 1e-9) for other in found)


def test_a_planner_that_needs_more_ranks_reports_it() -> None:
    request = PlanRequest(ranks=1, device="H100", tokens={"llm": 64}, schedules=("1f1b",))
    inputs = PlanInputs.of(tiny_model(), request, Workload(4, 2, dtype="bf16"))
    reasons = compare_planners.other_pipelines(search_pipelines(inputs))
    assert all("ranks is 1" in str(reason) for reason in reasons.values())


def test_rows_round_and_keep_reasons() -> None:
    class Solution:
        seconds = 0.5

    class Nearly:
        seconds = 0.5 * (1 - 1e-12)

    solved = {"Megatron-LM": Solution(), "DistMM": "no room", "Spindle": Nearly()}
    _, same, none, rounded = compare_planners.comparison_rows(0.5, solved, MAPPINGS)
    assert same["longer"] == rounded["longer"] == "the same"
    assert none["step"] == "-" and none["what it is"].endswith(": no room")
