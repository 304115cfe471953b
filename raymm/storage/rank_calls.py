"""Calls of ranks that read or write shards of checkpoints."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raymm.actors.faults.diagnosis import first_line
from raymm.actors.recovery.observed_ranks import LISTEN_S
from raymm.errors import CheckpointError, RankFailedError


def call_ranks(group: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of all ranks with the same arguments. Return the results by rank. Raise a
    ``CheckpointError`` if a rank failed with this error about a shard, and a ``RankFailedError`` if
    a rank died or raised another error."""
    try:
        return group.call(method, *args)
    except RankFailedError as error:
        reason = getattr(error.__cause__, "cause", None)
        if isinstance(reason, CheckpointError):
            raise reason from None
        raise


def call_ranks_behind(group: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of all ranks from a background thread while steps continue.

    The method must run in a separate thread of each rank. The main thread must watch the ranks,
    because this call neither checks them actively nor ends them. It waits for as long as they live.

    Raises:
        CheckpointError: a rank failed with this error about a shard, after all have finished; or a
            rank has no memory for its shard.
        RankFailedError: a rank died or raised another error, or all have ended.
    """
    try:
        refs = pending = group.start(method, *args)
        while pending:
            group.check_running()
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=LISTEN_S)
        return [_of_rank(rank, ref) for rank, ref in enumerate(refs)]
    except RayTaskError as error:
        if isinstance(error.cause, CheckpointError):
            raise error.cause from None
        raise RankFailedError(str(error)) from error
    except CheckpointError:  # a rank had no memory for its shard
        raise
    except (RayError, RuntimeError) as error:
        raise RankFailedError(first_line(error)) from error


def _of_rank(rank: int, ref: ray.ObjectRef) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, MemoryError):
            raise CheckpointError(f"rank {rank} has no memory to write its shard") from None
        raise
