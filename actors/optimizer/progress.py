"""Progress of a process's parameters."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Progress(NamedTuple):
    """Progress of a process's parameters.

    Attributes:
        whole: False if a later step was issued, which may have changed parameters.
    """

    steps: int
    whole: bool


def same_progress(progress: Collection[Progress | None]) -> int | None:
    """Return the number of steps that all processes have finished; None if processes differ, are
    within a step, or are lost."""
    steps = {each.steps if each is not None and each.whole else None for each in progress}
    return steps.pop() if len(steps) == 1 else None
