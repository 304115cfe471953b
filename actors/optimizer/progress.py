"""How far a process's parameters are."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Progress(NamedTuple):
    """How far a process's parameters are.

    Attributes:
        steps: optimizer steps that have finished.
        whole: False if a later step was issued, which may have changed parameters already.
    """

    steps: int
    whole: bool


def same_progress(progress: Collection[Progress | None]) -> int | None:
    """Steps that all processes have taken; None if they differ, one is within a step, or lost."""
    steps = {each.steps if each is not None and each.whole else None for each in progress}
    return steps.pop() if len(steps) == 1 else None
