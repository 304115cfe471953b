"""Conversion of multiplexed mappings to plans."""

from __future__ import annotations

from raymm.model.model import Model
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.multiplex.mapping import mapped_plan
from raymm.scheduler.plan.plan import Plan


def plan_of_mapping(
    model: Model, mapping: StageMapping, microbatches: int = 1
) -> Plan:
    """Return the plan that runs a mapping (Mosaic §3).

    Modules run in sequential slots on their GPUs and quotas. Replicas of a module split every
    microbatch by samples. Losses that the mapping does not name run after its last stage, on the
    GPUs of their last inputs. The microbatches of a step run sequentially; a mapping is planned for
    one.

    Raises:
        PlanError: the mapping is of other modules, or a module does not run after its inputs.
        ModelError: modules share parameters.
    """
    model.check_unshared()
    return mapped_plan(model.graph, mapping, microbatches)
