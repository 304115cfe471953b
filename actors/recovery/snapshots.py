"""Snapshots of all ranks in host memory, taken in the background and kept by surviving
processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import ray
from ray.exceptions import ObjectLostError, RayError

from raymm.errors import RankFailedError


class Ranks(Protocol):
    """Ranks whose state is copied."""

    def start(self, method: str, *args: Any, returns: int = 1) -> list[Any]: ...

    def call_each(self, method: str, args: Sequence[Any]) -> list[Any]: ...

    def keep(self, step: int, parts: Sequence[Any], newest: int) -> list[Any]:
        """Store each rank's part on a process of another node, if there is one; see
        ``RankGroup.keep``."""
        ...


@dataclass(frozen=True)
class TakenSnapshot:
    """Snapshot that is complete or being taken.

    Attributes:
        steps: references that resolve to the step once a rank has returned its part, or once a
            process on another node has stored it.
        parts: parts of the ranks in Ray's object store. The process that requested them owns them,
            so they outlive the ranks.
    """

    step: int
    steps: list[ray.ObjectRef]
    parts: list[ray.ObjectRef]
    kept: Any


class Snapshots:
    """Newest snapshot of a group of ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._newest: TakenSnapshot | None = None
        self._under_way: list[TakenSnapshot] = []

    def take(self, step: int, kept: Any = None) -> None:
        """Take a snapshot of the state after all calls that have been submitted. Does not wait."""
        newest = self.newest()
        self._ranks.start("copy_snapshot")
        handed = self._ranks.start("hand_over_snapshot", returns=2)
        steps, part_refs = map(list, zip(*handed, strict=True))
        steps += self._ranks.keep(step, part_refs, step if newest is None else newest.step)
        self._under_way.append(TakenSnapshot(step, steps, part_refs, kept))

    def newest(self) -> TakenSnapshot | None:
        """Return the newest snapshot that all ranks have returned, and drop older ones. Does not
        wait."""
        for number in reversed(range(len(self._under_way))):
            if _is_there(self._under_way[number]):
                self._newest = self._under_way[number]
                del self._under_way[: number + 1]
                break
        return self._newest

    def restore(self) -> TakenSnapshot:
        """Restore the newest snapshot on ranks that have reconnected, and return it.

        Raises:
            RankFailedError: a rank was lost meanwhile, and the call may be repeated; or a part of
                the snapshot is lost, and no snapshot is available from now on.
            LookupError: no snapshot is available.
        """
        newest = self.newest()
        self._under_way.clear()
        if newest is None:
            raise LookupError("no snapshot was taken")
        try:
            self._ranks.call_each("restore_snapshot", newest.parts)
        except RankFailedError as error:
            if not isinstance(getattr(error.__cause__, "cause", error.__cause__), ObjectLostError):
                raise
            self._newest = None
            raise RankFailedError(
                f"part of the snapshot of step {newest.step} was lost with the node that held it"
            ) from error
        return newest


def keepers(nodes: Mapping[int, str]) -> dict[int, int]:
    """Return, for each rank, the next rank (cyclically) that is on another node. Ranks without such
    a rank are omitted."""
    ring = sorted(nodes) * 2
    keeper_of: dict[int, int] = {}
    for rank, peer in reversed(list(pairwise(ring))):
        if nodes[peer] != nodes[rank]:
            keeper_of[rank] = peer
        elif peer in keeper_of:  # on the same node, so it needs the same one
            keeper_of[rank] = keeper_of[peer]
    return keeper_of


def _is_there(snapshot: TakenSnapshot) -> bool:
    _, pending = ray.wait(snapshot.steps, num_returns=len(snapshot.steps), timeout=0)
    if pending:
        return False
    try:
        return set(ray.get(snapshot.steps)) == {snapshot.step}
    except RayError:
        return False
