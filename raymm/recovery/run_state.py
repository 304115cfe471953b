"""What a run is doing, and what it may do next."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from raymm.errors import InternalError


class RunState(Enum):
    """What a run is doing."""

    INITIALIZING = "initializing"
    """Processes start, and get what they go on from."""
    RUNNING = "running"
    """Steps are taken, and evaluated."""
    SAVING = "saving"
    """Steps wait for a checkpoint, or for its copy in host memory."""
    RECOVERING = "recovering"
    """Something was lost: others come in its place, or the run's attempt is over."""
    RESIZING = "resizing"
    """Processes leave, as the cluster has room for another number of them."""
    FINISHED = "finished"
    """All steps are taken, or somebody asked the run to end."""
    FAILED = "failed"
    """It does not go on by itself."""


_ENDS = {RunState.FINISHED, RunState.FAILED}
TRANSITIONS: Mapping[RunState, frozenset[RunState]] = {
    RunState.INITIALIZING: frozenset({RunState.RUNNING, RunState.RECOVERING, *_ENDS}),
    RunState.RUNNING: frozenset({
        RunState.SAVING, RunState.RECOVERING, RunState.RESIZING, *_ENDS
    }),
    RunState.SAVING: frozenset({RunState.RUNNING, RunState.RECOVERING, *_ENDS}),
    # In the same processes, or in others.
    RunState.RECOVERING: frozenset({RunState.RUNNING, RunState.INITIALIZING, *_ENDS}),
    RunState.RESIZING: frozenset({RunState.INITIALIZING, *_ENDS}),
    RunState.FINISHED: frozenset(),
    RunState.FAILED: frozenset(),
}


def checked(before: RunState, after: RunState) -> RunState:
    """The state after another one; a state may follow itself.

    Args:
        before: what the run was doing.
        after: what it does now.

    Raises:
        InternalError: :data:`TRANSITIONS` does not have it.
    """
    if after is not before and after not in TRANSITIONS[before]:
        raise InternalError(f"the run state cannot change from {before.value} to {after.value}")
    return after
