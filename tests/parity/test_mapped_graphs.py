"""Graphs of modules in slots on quotas equal one process, on Ray actors.

So do pipelines whose replicas share microbatches by samples. Compares loss, gradients and updates.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from raymm.runtime.specs import ParallelSpec, dag_plan
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage, Placement, mapped_plan
from raymm.scheduler.plan.plan import Plan
from tests.parity.test_pipelined_graphs import (
    chain_batch,
    chained,
    check,
    deep_clip,
    steps_of,
    talk_batch,
    talking,
)
from tests.parity.test_ports import deep_batch, deep_stack
from tests.support.multiplex_models import (
    ImageBind,
    Unified,
    clip_batch,
    imagebind_batch,
    unified_batch,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")


def mapped(dag, gpus: int, *stages, microbatches: int = 1) -> Plan:
    """Return a mapping's plan; stages have modules with GPUs and tenths of them."""
    mapping = Mapping(gpus, 10, tuple(
        MultiplexStage(tuple(Placement(m, g, q) for m, (g, q) in stage.items()), 1.0)
        for stage in stages
    ))
    return mapped_plan(dag.graph, mapping, microbatches)


def test_clip_in_one_slot_on_quotas():
    """Compare all samples in the loss, on the two processes of the second tower."""
    dag = deep_clip()
    plan = mapped(dag, 2, {"image": ((0, 1), 6), "text": ((1,), 4)})
    output = check(dag, plan, steps_of(clip_batch, 1, (7,)))
    assert {round(span.quota, 3) for span in output.timeline.spans} >= {0.6, 0.4}


def test_fewer_samples_than_processes():
    dag = deep_clip()
    plan = mapped(dag, 4, {"image": ((0, 1, 2, 3), 10)}, {"text": ((0, 2), 10)})
    check(dag, plan, steps_of(clip_batch, 1, (3,)))


def test_six_towers_in_two_slots_and_microbatches():
    dag = ImageBind().dag()
    plan = mapped(
        dag, 4,
        {"image": ((0, 1), 5), "text": ((0, 1), 5), "audio": ((2, 3), 10)},
        {"depth": ((0,), 10), "thermal": ((1, 2), 3), "imu": ((2, 3), 7)}, microbatches=2,
    )
    check(dag, plan, steps_of(imagebind_batch, 2))


def test_encoders_a_backbone_and_decoders():
    dag = Unified().dag()
    plan = mapped(
        dag, 2, {"vision": ((0, 1), 4), "audio": ((0,), 6)}, {"adapt": ((1,), 10)},
        {"backbone": ((0, 1), 10)}, {"image": ((0, 1), 5), "text": ((0, 1), 5)},
    )
    check(dag, plan, steps_of(unified_batch, 1, (5,)))


def test_features_of_three_layers_and_a_talker_in_slots():
    """Let a language model's layers read an encoder's; another module reads a loss."""
    dag = deep_stack()
    plan = mapped(dag, 2, {"vision": ((0, 1), 10)}, {"llm": ((0,), 10)}, microbatches=2)
    check(dag, plan, steps_of(deep_batch, 2))
    dag = talking()
    plan = mapped(dag, 2, {"thinker": ((0, 1), 10)}, {"talker": ((1,), 10)})
    check(dag, plan, steps_of(talk_batch, 1))


def split(plan: Plan, *modules: str) -> Plan:
    """Return the same plan, with microbatches shared by samples by replicas of these modules."""
    stages = tuple(
        replace(stage, split="samples") if stage.module in modules else stage
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


@pytest.mark.cells(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_pipelines_whose_replicas_share_microbatches(schedule):
    """Use a tower in two stages with two replicas by samples, and one by microbatches.

    The loss compares all samples of both, on two processes.
    """
    dag = deep_clip()
    specs = {
        "image": ParallelSpec(pp=2, dp=2), "text": ParallelSpec(dp=2),
        "contrastive": ParallelSpec(dp=2),
    }
    plan = split(dag_plan(dag, specs, 4, schedule), "image", "contrastive")
    check(dag, plan, steps_of(clip_batch, 4, (5, 3, 1, 6)))


def test_several_outputs_and_a_loss_read_by_samples():
    dag = chained()
    specs = {
        "first": ParallelSpec(pp=2, dp=2), "second": ParallelSpec(pp=2),
        "head": ParallelSpec(dp=2),
    }
    check(dag, split(dag_plan(dag, specs, 2), "first", "head"), steps_of(chain_batch, 2))
    dag = talking()
    specs = {"thinker": ParallelSpec(pp=2, dp=2), "talker": ParallelSpec(dp=2)}
    plan = split(dag_plan(dag, specs, 2), "thinker", "talker")
    check(dag, plan, steps_of(talk_batch, 2))
