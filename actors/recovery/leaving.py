"""Ranks leave a failed step, so that they can reconnect."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from raymm.actors.faults.inquiry import kill_from_outside
from raymm.actors.faults.stacks import Address
from raymm.actors.optimizer.progress import Progress

# Seconds for ranks to leave a step whose connections were shut down; an instruction in progress
# ends first. Ranks that do not leave in time are replaced.
LEAVE_S = 30.0


def cut(actors: Collection[Any], generation: int) -> None:
    """Shut down connections, so that ranks which wait for others fail at once. Does not wait."""
    for actor in actors:
        actor.cut.remote(generation)


def leave(
    actors: Mapping[int, Any], generation: int, timeout: float = LEAVE_S
) -> dict[int, Progress]:
    """Make ranks leave the step in progress; return the progress of those that did within
    ``timeout`` s."""
    cut(list(actors.values()), generation)
    refs = {rank: actor.leave.remote() for rank, actor in actors.items()}
    if refs:
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout)
    progress: dict[int, Progress] = {}
    for rank, ref in refs.items():
        try:
            progress[rank] = ray.get(ref, timeout=0)
        except RayError:  # dead, or too late
            continue
    return progress


def end(actors: Mapping[int, Any], addresses: Mapping[int, Address]) -> None:
    kill_from_outside({rank: addresses[rank] for rank in actors if rank in addresses})
    for actor in actors.values():
        ray.kill(actor, no_restart=True)
