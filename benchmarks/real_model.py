"""Small vision-language model with real compute on two ranks: profile, prediction, steps.

The ranks compute at the same time and share the machine's caches and memory, which slows products
by 10 to 25% on two cores. So layers are profiled while another process computes as well. The
machine's speed also changes from minute to minute, so layers are profiled before and after the
steps, and the prediction is the mean of both. ``schedule_error`` depends on neither: it predicts
each step from the durations of the step's own operations.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaModel, SiglipVisionConfig

from benchmarks.shared import image_text
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.profiling.layers import LayerMeasurement
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Op, Program
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
# Modules that are trained in addition to the projector.
CASES = {"llm_trained": False, "projector_only": True}
WARM_UP_STEPS = 2
PROFILE_REPEATS = 9


@dataclass(frozen=True)
class RealRow:
    """Results of one case and schedule.

    Attributes:
        predicted: seconds of a step, the mean of the profiles before and after the steps.
        ops: (profiled before, measured) seconds by stage and operation.
        schedule_errors: per step, relative error of the prediction from the mean durations of the
            step's own operations.
    """

    case: str
    schedule: str
    predicted: float
    measured: float
    steps: tuple[float, ...]
    ops: dict[str, tuple[float, float]]
    schedule_errors: tuple[float, ...]

    @property
    def error(self) -> float:
        """Return the relative error of the prediction by the profile."""
        return self.predicted / self.measured - 1

    @property
    def schedule_error(self) -> float:
        """Return the median of :attr:`schedule_errors`."""
        return statistics.median(self.schedule_errors)


def build_model(llm_frozen: bool) -> MultimodalModule:
    """Build SigLIP, an MLP as projector and Llama, with random weights; the encoder is frozen."""
    vision = ModalityModule(SiglipVisionConfig(**VISION), "mlp", frozen=True, seed=1)
    language = ModalityModule(LlamaConfig(**LLAMA), frozen=llm_frozen, seed=2)
    return MultimodalModule({"vision": vision}, language)


def microbatches(count: int) -> list[dict[str, Any]]:
    """Return microbatches of :data:`ROWS` rows with one image each."""
    size = VISION["image_size"]
    return image_text.microbatches(count, ROWS, TEXT_TOKENS, LLAMA["vocab_size"], size)


def message_floats() -> int:
    """Return the floats that the encoder sends to the language model per microbatch."""
    patches = (VISION["image_size"] // VISION["patch_size"]) ** 2
    return ROWS * patches * LLAMA["hidden_size"]


def profile(repeats: int = PROFILE_REPEATS) -> CostProfile:
    """Measure layer costs on a microbatch, with one thread, while another process computes."""
    with _busy_neighbour():
        table = LayerMeasurement(build_model(False), microbatches(1)[0], repeats=repeats).run()
    return table.at()


@contextmanager
def _busy_neighbour() -> Iterator[None]:
    code = f"from {__name__} import compute; compute()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # the other process computes
        yield
    finally:
        process.kill()
        process.wait()


def compute() -> None:
    """Print a line, then train the language model in one thread until the process is killed."""
    torch.set_num_threads(1)
    model = LlamaModel(LlamaConfig(**LLAMA))
    tokens = torch.zeros(ROWS, TEXT_TOKENS * 2, dtype=torch.long)
    print("computing", flush=True)
    while True:
        model(tokens).last_hidden_state.sum().backward()


def run_case(case: str, latency: float, steps: int) -> list[RealRow]:
    """Predict and measure a step with each schedule.

    Args:
        case: key of :data:`CASES`.
        latency: seconds per message.
        steps: measured steps per schedule, after a warm-up.
    """
    model = build_model(CASES[case])
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(ranks=(0,))}, ParallelSpec(ranks=(1,)), MICROBATCHES
    )
    before = profile()
    plan = replace(spec.plan(model), profile=before)
    batch = microbatches(MICROBATCHES)
    runs = []
    with ParallelModel(model, plan, threads=1) as parallel:
        for schedule in SCHEDULES:
            parallel.reschedule(replace(plan, schedule=schedule))
            program = parallel.program([["vision"]] * MICROBATCHES, update=False)
            timelines = [parallel.execute(batch).timeline for _ in range(WARM_UP_STEPS + steps)]
            runs.append((parallel.plan, program, timelines[WARM_UP_STEPS:]))
    after = profile()
    rows = []
    for schedule, (scheduled, program, timelines) in zip(SCHEDULES, runs, strict=True):

        def simulated(costs: dict[tuple[StageId, Op], float], program: Program = program) -> float:
            return simulate(program, costs, latency, posted=plan.posted_receives).makespan

        expected = op_seconds(scheduled)
        predicted = [simulated(op_seconds(replace(scheduled, profile=p))) for p in (before, after)]
        spans = tuple(timeline.makespan for timeline in timelines)
        errors = tuple(
            simulated({**expected, **{
                op: statistics.mean(values) for op, values in _op_seconds([timeline]).items()
            }}) / timeline.makespan - 1
            for timeline in timelines
        )
        rows.append(RealRow(
            case, schedule, statistics.mean(predicted), statistics.median(spans), spans,
            _compare_ops(expected, timelines), errors,
        ))
    return rows


def _compare_ops(
    expected: dict[tuple[StageId, Op], float], timelines: list[Timeline]
) -> dict[str, tuple[float, float]]:
    return {
        f"{stage} {op.value}": (expected[stage, op], statistics.median(values))
        for (stage, op), values in sorted(_op_seconds(timelines).items())
    }


def _op_seconds(timelines: list[Timeline]) -> dict[tuple[StageId, Op], list[float]]:
    durations: dict[tuple[StageId, Op], list[float]] = {}
    for timeline in timelines:
        for span in timeline.compute():
            durations.setdefault((span.stage, Op(span.op)), []).append(span.end - span.start)
    return durations
