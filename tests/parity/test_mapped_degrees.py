"""Modules in slots support the features of pipelines.

Tensor, token and sample sharding within a rank, stages, recomputation, several microbatches.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from raymm.runtime.specs import ParallelSpec, dag_plan
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedules.slots import Slots
from tests.parity.test_pipelined_graphs import check, deep_clip, steps_of
from tests.support.multiplex_models import clip_batch

pytestmark = pytest.mark.usefixtures("ray_cluster")


def in_slots(plan: Plan, slots: dict[str, int]) -> Plan:
    """Put the plan's stages into consecutive slots, beginning with the slot of each module."""
    stages = tuple(
        replace(stage, slot=slots[stage.module] + stage.index, split="samples")
        if stage.replica or len(plan.replicas(stage.module)) > 1
        else replace(stage, slot=slots[stage.module] + stage.index)
        for stage in plan.stages
    )
    return replace(plan, stages=stages, schedule=Slots.name)


@pytest.mark.cells(1)
@pytest.mark.parametrize(("specs", "slots"), [
    # Two ranks of two processes; both towers alternate on each.
    ({"image": {"tp": 2, "pp": 2, "ranks": (0, 1)}, "text": {"tp": 2, "ranks": (1,)},
      "contrastive": {"ranks": (2,)}}, {"image": 0, "text": 2, "contrastive": 3}),
    ({"image": {"cp": 2, "ranks": (0,)}, "text": {"cp": 2, "pp": 2, "ranks": (0, 1)},
      "contrastive": {"ranks": (2,)}}, {"image": 2, "text": 0, "contrastive": 3}),
    ({"image": {"dp": 2, "sharding": "fsdp", "ranks": (0,)},
      "text": {"dp": 2, "sharding": "fsdp", "ranks": (0,)},
      "contrastive": {"ranks": (1,)}}, {"image": 0, "text": 1, "contrastive": 2}),
    ({"image": {"dp": 2, "ranks": (0, 1)}, "text": {"pp": 3, "ranks": (0, 1, 0)},
      "contrastive": {"ranks": (1,)}}, {"image": 0, "text": 1, "contrastive": 4}),
], ids=["tp", "cp", "fsdp", "pipelines"])  # fmt: skip
@pytest.mark.parametrize("recompute", [False, True])
def test_towers_in_slots(specs, slots, recompute):
    dag = deep_clip()
    layouts = {name: ParallelSpec(**spec) for name, spec in specs.items()}
    plan = in_slots(dag_plan(dag, layouts, 2, recompute=recompute), slots)
    check(dag, plan, steps_of(clip_batch, 2))
