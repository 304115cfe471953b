"""What blocks of a stage do with their activations: whether that can be."""

from __future__ import annotations

from raymm.errors import PlanError
from raymm.scheduler.costs.recomputation import OPTIONS
from raymm.scheduler.plan.stage import Stage


def check_layer_options(stage: Stage, blocks: int, schedule: str) -> None:
    """
    Args:
        stage: of a plan.
        blocks: that it has; it may have a projector or a head besides.
        schedule: the plan's.

    Raises:
        PlanError: if its options are none, or cannot be with the schedule.
    """
    options = stage.layer_options
    if not options:
        return
    if len(options) != max(blocks, 0) or not set(options) <= set(OPTIONS):
        raise PlanError(
            f"layer_options of stage {stage.id} are {list(options)}; each of its "
            f"{max(blocks, 0)} blocks needs one of {', '.join(OPTIONS)}"
        )
    if set(options) == {OPTIONS[0]}:
        return
    if stage.recompute:
        raise PlanError(
            f"stage {stage.id} has layer_options and recompute, which recomputes the whole stage; "
            "set only one of them"
        )
    if schedule == "zero_bubble":
        raise PlanError(
            f"stage {stage.id} has layer_options, but schedule is 'zero_bubble', whose two "
            "backward passes would each recompute; use '1f1b' or 'gpipe', or set recompute"
        )
