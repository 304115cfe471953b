"""GPipe (Huang et al. 2019)."""

from __future__ import annotations

from typing import Any

from raymm.scheduler.schedules.base import ListedSchedule
from raymm.scheduler.schedules.policy import Rules


class GPipe(ListedSchedule):
    """All forwards of a stage, then all of its backwards."""

    name = "gpipe"

    def listed(self, step: Any) -> Any:
        return step.run(Rules(flush=True), step.until)
