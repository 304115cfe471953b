"""Groups of microbatches that share one forward and one backward of a module.

A module with a factor k keeps a FORWARD and a BACKWARD per microbatch, and every message belongs to
one microbatch, so programs and their proof do not depend on factors. The first FORWARD of a group
computes the outputs of all of its microbatches; the last BACKWARD of a group computes the gradients
of all. This holds in any order of tasks, because the module needs nothing but its own data.
"""

from __future__ import annotations

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId


def group_spans(plan: Plan) -> dict[StageId, int]:
    """Return, for each stage with a factor above 1, the number of consecutive microbatches of the
    step that a group spans. Replicas take microbatches in turn, so microbatch m of a stage is in
    group ``m // span``."""
    return {
        stage.id: stage.microbatch_factor * len(plan.replicas(stage.module))
        for stage in plan.stages if stage.microbatch_factor > 1
    }
