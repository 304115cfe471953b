"""What ranks are asked to do with shards of checkpoints."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raymm.actors.faults.failure import first_line
from raymm.actors.recovery.observed_ranks import LISTEN_S
from raymm.errors import CheckpointError, RankFailedError


def call_ranks(group: Any, method: str, *args: Any) -> list[Any]:
    """Results by rank.

    Args:
        group: of the ranks.
        method: of them.
        *args: the same for all.

    Raises:
        CheckpointError: what a rank said of a shard, if that is why it failed.
        RankFailedError: a rank died, or raised something else.
    """
    try:
        return group.call(method, *args)
    except RankFailedError as error:
        reason = getattr(error.__cause__, "cause", None)
        if isinstance(reason, CheckpointError):
            raise reason from None
        raise


def call_ranks_behind(group: Any, method: str, *args: Any) -> list[Any]:
    """:func:`call_ranks` of a method that has a thread of its own, in a thread of the driver's:
    steps go on meanwhile. Whoever waits for these looks after the ranks; nothing is asked of them
    here, or ended, whatever happens. Takes as long as they live.

    Args:
        group, method: as there.
        *args: the same for all.

    Raises:
        CheckpointError: what a rank said of a shard, once all have ended with theirs; or a rank
            had no memory for it.
        RankFailedError: a rank died, or raised something else, or all have ended.
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
    except CheckpointError:  # who had no memory for it
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
