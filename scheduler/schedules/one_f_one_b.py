"""1F1B on a graph of stages."""

from __future__ import annotations

from typing import Any

from raymm.scheduler.schedules.base import ListedSchedule
from raymm.scheduler.schedules.policy import Rules


class OneFOneB(ListedSchedule):
    """One forward, one backward.

    The warm-up depth of a stage is its longest path to the loss (Cornstarch v1 §4.1, Fig. 6).
    Whenever a rank is free, it runs the ready forward of the oldest microbatch (of two stages, the
    one nearest to the loss), else the ready backward of the oldest. A stage never holds more
    microbatches than its depth. On a chain with one stage per rank and equal costs this is textbook
    1F1B. Forwards go first because other ranks wait for them; on a rank that several stages share
    (chunks of an interleaved pipeline), backwards first would drain the pipeline after it.
    """

    name = "1f1b"
    holds_warm_up = True

    def listed(self, step: Any) -> Any:
        return step.run(Rules(), step.until)
