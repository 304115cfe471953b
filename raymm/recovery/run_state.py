"""States of a run and the allowed transitions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from raymm.errors import InternalError


class RunState(Enum):
    """State of a run."""

    INITIALIZING = "initializing"
    """Processes start and load the state to resume from."""
    RUNNING = "running"
    """Steps and evaluations run."""
    SAVING = "saving"
    """Steps wait for a checkpoint, or for its copy in host memory."""
    RECOVERING = "recovering"
    """Lost processes are replaced, or the attempt ends."""
    RESIZING = "resizing"
    """Processes end because the cluster has room for another number of them."""
    FINISHED = "finished"
    """All steps are taken, or a stop was requested."""
    FAILED = "failed"
    """The run failed and does not resume by itself."""


_ENDS = {RunState.FINISHED, RunState.FAILED}
TRANSITIONS: Mapping[RunState, frozenset[RunState]] = {
    RunState.INITIALIZING: frozenset({RunState.RUNNING, RunState.RECOVERING, *_ENDS}),
    RunState.RUNNING: frozenset({RunState.SAVING, RunState.RECOVERING, RunState.RESIZING, *_ENDS}),
    RunState.SAVING: frozenset({RunState.RUNNING, RunState.RECOVERING, *_ENDS}),
    # To RUNNING in the same processes, to INITIALIZING in new ones.
    RunState.RECOVERING: frozenset({RunState.RUNNING, RunState.INITIALIZING, *_ENDS}),
    RunState.RESIZING: frozenset({RunState.INITIALIZING, *_ENDS}),
    RunState.FINISHED: frozenset(),
    RunState.FAILED: frozenset(),
}


def checked(before: RunState, after: RunState) -> RunState:
    """Return the new state if the transition is allowed; a state may follow itself. Raise an
    ``InternalError`` if :data:`TRANSITIONS` has no such transition."""
    if after is not before and after not in TRANSITIONS[before]:
        raise InternalError(f"the run state cannot change from {before.value} to {after.value}")
    return after
