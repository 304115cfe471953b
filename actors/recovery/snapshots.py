"""Snapshots of all ranks in host memory: taken behind the steps, kept by whoever survives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import ObjectLostError, RayError

from raymm.errors import RankFailedError


class Ranks(Protocol):
    """Whose snapshots are taken."""

    def start(self, method: str, *args: Any, returns: int = 1) -> list[Any]:
        """Call a method on every rank without waiting.

        Args:
            method: its name.
            *args: the same for all.
            returns: parts of each result, with a reference each.
        """
        ...

    def call_each(self, method: str, args: Sequence[Any]) -> list[Any]:
        """Call a method on every rank.

        Args:
            method: its name.
            args: by rank.
        """
        ...

    def keep(self, step: int, parts: Sequence[Any], newest: int) -> list[Any]:
        """Have a process of another node keep each rank's part, where there is one. Does not wait.

        Args:
            step: of the snapshot.
            parts: by rank.
            newest: older ones are not kept any more.
        """
        ...


@dataclass(frozen=True)
class TakenSnapshot:
    """A snapshot that is being taken, or is there.

    Attributes:
        step: steps that the ranks have taken by then.
        steps: what each says of that, once it has handed over its part; and those that keep one of
            a process on another node, once they have it.
        parts: of each rank, in Ray's object store. The process that asked for them owns them, so
            they outlive the ranks.
        kept: what goes with it.
    """

    step: int
    steps: list[ray.ObjectRef]
    parts: list[ray.ObjectRef]
    kept: Any


class Snapshots:
    """The newest snapshot of a group of ranks.

    Args:
        ranks: the group.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._newest: TakenSnapshot | None = None
        self._under_way: list[TakenSnapshot] = []

    def take(self, step: int, kept: Any = None) -> None:
        """Take one of the state after the calls that ranks have by now. Does not wait.

        Args:
            step: steps that they have taken by then.
            kept: what goes with it.
        """
        newest = self.newest()
        self._ranks.start("copy_snapshot")
        handed = self._ranks.start("hand_over_snapshot", returns=2)
        steps, parts = map(list, zip(*handed, strict=True))
        steps += self._ranks.keep(step, parts, step if newest is None else newest.step)
        self._under_way.append(TakenSnapshot(step, steps, parts, kept))

    def newest(self) -> TakenSnapshot | None:
        """The newest that all ranks have handed over; those before it are let go of. Does not
        wait."""
        for number in reversed(range(len(self._under_way))):
            if _is_there(self._under_way[number]):
                self._newest = self._under_way[number]
                del self._under_way[: number + 1]
                break
        return self._newest

    def restore(self) -> TakenSnapshot:
        """Have ranks, which have met anew, go back to the newest one; returns it.

        Raises:
            RankFailedError: a rank was lost meanwhile; it may be tried again. Or nobody has a part
                of it any more: then there is none from now on.
            LookupError: there is none.
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
    """For each rank the next one, after the last comes the first, that is on another node; those
    without such a rank are left out.

    Args:
        nodes: by rank.
    """
    ranks = sorted(nodes)
    keeper_of: dict[int, int] = {}
    for at, rank in enumerate(ranks):
        others = (*ranks[at + 1 :], *ranks[:at])
        keeper = next((other for other in others if nodes[other] != nodes[rank]), None)
        if keeper is not None:
            keeper_of[rank] = keeper
    return keeper_of


def _is_there(snapshot: TakenSnapshot) -> bool:
    _, pending = ray.wait(snapshot.steps, num_returns=len(snapshot.steps), timeout=0)
    if pending:
        return False
    try:
        return set(ray.get(snapshot.steps)) == {snapshot.step}
    except RayError:
        return False
