"""Checks of per-block activation options of a stage."""

from __future__ import annotations

from raymm.errors import PlanError
from raymm.scheduler.costs.recomputation import OPTIONS
from raymm.scheduler.plan.stage import Stage


def check_layer_options(stage: Stage, blocks: int, schedule: str) -> None:
    """Raise ``PlanError`` if the layer options of a stage with ``blocks`` blocks (without projector
    and head) are invalid or do not work with the schedule."""
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
