"""Graphs of transformers on Ray actors, in pipelines and in slots, equal one process.

Encoders that feed encoders that feed a language model, and a language model with a flow-matching
head.
"""

from __future__ import annotations

import pytest
import torch

from raymm.actors.modules.noise import SampleSeeds
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import ParallelSpec, dag_plan
from tests.parity.test_mapped_graphs import mapped, split
from tests.parity.test_pipelined_graphs import check, steps_of
from tests.support.graph_models import flow_batch, flowing, reading, reading_batch

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_sam_a_clip_and_a_language_model_in_stages():
    dag = reading()
    specs = {
        "sam": ParallelSpec(pp=2), "clip": ParallelSpec(dp=2), "llm": ParallelSpec(pp=2, tp=2),
    }
    check(dag, dag_plan(dag, specs, 2), steps_of(reading_batch, 2))


def test_a_sam_a_clip_and_a_language_model_in_slots():
    dag = reading()
    plan = mapped(
        dag, 2, {"sam": ((0, 1), 10)}, {"clip": ((1,), 10)}, {"llm": ((0, 1), 10)},
    )
    check(dag, plan, steps_of(reading_batch, 1))


@pytest.mark.cells(1)
@pytest.mark.parametrize(("llm", "flow", "schedule"), [
    ({"pp": 2}, {"dp": 2}, "1f1b"),
    ({"tp": 2}, {"pp": 2}, "zero_bubble"),
    ({"pp": 2, "dp": 2, "sharding": "fsdp"}, {"pp": 3}, "1f1b"),
])  # fmt: skip
def test_a_flow_matching_head_in_stages(llm, flow, schedule):
    """Draw noise per sample; times are passed to later stages."""
    dag = flowing()
    specs = {"llm": ParallelSpec(**llm), "flow": ParallelSpec(**flow)}
    plan = dag_plan(dag, specs, 2, schedule, recompute=schedule == "1f1b")
    check(dag, plan, steps_of(flow_batch, 2))


def test_a_flow_matching_head_in_slots():
    """Colocate on quotas, in two microbatches; and with fewer samples than processes."""
    dag = flowing()
    plan = mapped(dag, 2, {"llm": ((0, 1), 10)}, {"flow": ((0, 1), 10)}, microbatches=2)
    check(dag, plan, steps_of(flow_batch, 2, (3, 1)))


def test_noise_does_not_depend_on_the_microbatches():
    """Compare two microbatches, replicas that share them, several batches, and evaluation."""
    dag = flowing()
    parts = [flow_batch(size, size) for size in (2, 3)]
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    plan = split(dag_plan(dag, {"flow": ParallelSpec(dp=2)}, 2), "flow")
    with ParallelModel(dag, plan, timeout_s=120, seed=5) as running:
        due = [dag(whole, SampleSeeds(5, 0, batch)).loss.item() for batch in (0, 1)]
        assert [running.execute(parts).loss for _ in due] == pytest.approx(due, rel=1e-6)
        assert due[0] != pytest.approx(due[1], rel=1e-3)
        assert running.evaluate(parts).loss == pytest.approx(due[0], rel=1e-6)
