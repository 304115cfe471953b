"""Ranks leave a step that failed, so that they can meet anew."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from raymm.actors.faults.inquiry import kill_from_outside
from raymm.actors.faults.stacks import Address
from raymm.actors.optimizer.progress import Progress

# Seconds that ranks have to leave a step whose connections are cut: an instruction under way ends
# first. Those that do not are replaced.
LEAVE_S = 30.0


def cut(actors: Collection[Any], generation: int) -> None:
    """End connections, so that ranks which wait for others do not any more. Does not wait.

    Args:
        actors: of the ranks.
        generation: of the connections.
    """
    for actor in actors:
        actor.cut.remote(generation)


def leave(
    actors: Mapping[int, Any], generation: int, timeout: float = LEAVE_S
) -> dict[int, Progress]:
    """Have ranks leave what is under way; returns how far those are that have.

    Args:
        actors: by rank.
        generation: of their connections.
        timeout: seconds for all of them.
    """
    cut(list(actors.values()), generation)
    refs = {rank: actor.leave.remote() for rank, actor in actors.items()}
    if refs:
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout)
    left: dict[int, Progress] = {}
    for rank, ref in refs.items():
        try:
            left[rank] = ray.get(ref, timeout=0)
        except RayError:  # dead, too, or not there in time
            continue
    return left


def end(actors: Mapping[int, Any], addresses: Mapping[int, Address]) -> None:
    """End processes for good, whatever they are doing.

    Args:
        actors: by rank.
        addresses: of those that are known.
    """
    kill_from_outside({rank: addresses[rank] for rank in actors if rank in addresses})
    for actor in actors.values():
        ray.kill(actor, no_restart=True)
