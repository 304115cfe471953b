"""A small vision-language model with real compute on two ranks: profile, prediction, steps."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

from transformers import LlamaConfig, SiglipVisionConfig

from benchmarks import _image_text
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.profiling.layers import profile_model
from raymm.runtime.pipelined import MultimodalParallelModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.program.program import Op
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds

VISION = {
    "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 5,
    "num_attention_heads": 6, "image_size": 112, "patch_size": 14,
}
LLAMA = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 4096,
    "max_position_embeddings": 512,
}
ROWS, TEXT_TOKENS, MICROBATCHES = 4, 64, 6
SCHEDULES = ("1f1b", "zero_bubble")
# What is trained beside the projector.
CASES = {"llm_trained": False, "projector_only": True}
WARM_UP_STEPS = 2
PROFILE_REPEATS = 9


@dataclass(frozen=True)
class RealRow:
    """One case and schedule, seconds of a step; ``ops`` has (profiled, measured) seconds per
    op and stage."""

    case: str
    schedule: str
    predicted: float
    measured: float
    steps: tuple[float, ...]
    ops: dict[str, tuple[float, float]]

    @property
    def error(self) -> float:
        """Of the prediction, relative to the measurement."""
        return self.predicted / self.measured - 1


def build_model(llm_frozen: bool) -> MultimodalModule:
    """SigLIP, an MLP as projector and Llama, with random weights; the encoder is frozen."""
    vision = ModalityModule(SiglipVisionConfig(**VISION), "mlp", frozen=True, seed=1)
    language = ModalityModule(LlamaConfig(**LLAMA), frozen=llm_frozen, seed=2)
    return MultimodalModule({"vision": vision}, language)


def microbatches(count: int) -> list[dict[str, Any]]:
    """Microbatches of :data:`ROWS` rows, an image each."""
    size = VISION["image_size"]
    return _image_text.microbatches(count, ROWS, TEXT_TOKENS, LLAMA["vocab_size"], size)


def message_floats() -> int:
    """Floats that the encoder hands to the language model per microbatch."""
    patches = (VISION["image_size"] // VISION["patch_size"]) ** 2
    return ROWS * patches * LLAMA["hidden_size"]


def profile(repeats: int = PROFILE_REPEATS) -> CostProfile:
    """Measured layer costs of the model on a microbatch, one thread."""
    table = profile_model(build_model(False), microbatches(1)[0], repeats=repeats)
    return table.at()


def run_case(case: str, costs: CostProfile, latency: float, steps: int) -> list[RealRow]:
    """Predict and measure a step of one of :data:`CASES` with each schedule.

    Args:
        case: which.
        costs: from :func:`profile`.
        latency: seconds of a message.
        steps: measured per schedule, after a warm-up.
    """
    model = build_model(CASES[case])
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(ranks=(0,))}, ParallelSpec(ranks=(1,)), MICROBATCHES
    )
    plan = replace(spec.plan(model), profile=costs)
    batch = microbatches(MICROBATCHES)
    rows = []
    with MultimodalParallelModule(model, plan, threads=1) as parallel:
        for schedule in SCHEDULES:
            parallel.reschedule(replace(plan, schedule=schedule))
            program = parallel.program([["vision"]] * MICROBATCHES, update=False)
            expected = op_seconds(parallel.plan)
            predicted = simulate(
                program, expected, latency, posted=plan.posted_receives
            ).makespan
            timelines = [parallel.execute(batch).timeline for _ in range(WARM_UP_STEPS + steps)]
            timelines = timelines[WARM_UP_STEPS:]
            spans = tuple(timeline.makespan for timeline in timelines)
            rows.append(
                RealRow(case, schedule, predicted, statistics.median(spans), spans,
                        _compare_ops(expected, timelines))
            )
    return rows


def _compare_ops(
    expected: dict[tuple[str, Op], float], timelines: list[Timeline]
) -> dict[str, tuple[float, float]]:
    found: dict[tuple[str, Op], list[float]] = {}
    for timeline in timelines:
        for span in timeline.compute():
            found.setdefault((span.stage, Op(span.op)), []).append(span.end - span.start)
    return {
        f"{stage} {op.value}": (expected[stage, op], statistics.median(values))
        for (stage, op), values in sorted(found.items())
    }
