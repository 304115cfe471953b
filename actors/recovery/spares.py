"""Spare processes that can replace lost ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError

from raymm.actors.faults.heartbeats import BEAT_S
from raymm.actors.faults.inquiry import inquire


class Spare(NamedTuple):
    """Spare actor with its place; ``warm`` is ready once it has imported everything that ranks
    need."""

    actor: Any
    place: Any
    warm: ray.ObjectRef


class Spares:
    """Warm processes, each in its own place."""

    def __init__(self, places: Sequence[Any] = ()) -> None:
        self._free = list(places)
        self._waiting: list[Spare] = []
        # Pending query of each spare's state, by its `warm` reference.
        self._asked: dict[ray.ObjectRef, ray.ObjectRef] = {}

    def restock(self, start: Callable[[Any], tuple[Any, ray.ObjectRef]]) -> None:
        """Start a spare process in every free place. Does not wait.

        Args:
            start: starts a process in a place; returns its actor and the reference that is ready
                once it is warm. Not stored: it is a method of the spares' owner, which would then
                never be freed.
        """
        for bundle in self._free:
            actor, warm = start(bundle)
            self._waiting.append(Spare(actor, bundle, warm))
        self._free.clear()

    def look(self) -> None:
        """Remove spares that have died, and free their places. Does not wait: a spare that died
        after the previous check may be found at the next one."""
        for spare in list(self._waiting):
            if spare.warm not in self._asked:
                self._asked[spare.warm] = spare.actor.where.remote()
            elif (error := _ended(self._asked[spare.warm])) is not None:
                del self._asked[spare.warm]
                if isinstance(error, RayActorError):
                    self._waiting.remove(spare)
                    self._free.append(spare.place)

    def take(self, most: int) -> list[Spare]:
        """Remove and return up to ``most`` warm spares that answer. Places of dead spares become
        free."""
        warm = [spare for spare in self._waiting if _is_there(spare.warm)]
        answers = inquire({number: spare.actor for number, spare in enumerate(warm)}, BEAT_S)
        for number in answers.dead:
            self._waiting.remove(warm[number])
            self._asked.pop(warm[number].warm, None)
            self._free.append(warm[number].place)
        chosen = [warm[number] for number in sorted(answers.reports)[:most]]
        for spare in chosen:
            self._waiting.remove(spare)
            self._asked.pop(spare.warm, None)
        return chosen

    def has_warm(self) -> bool:
        """Return True if a warm spare exists. It may have died since the last check."""
        return any(_is_there(spare.warm) for spare in self._waiting)

    def give(self, place: Any) -> None:
        self._free.append(place)

    @property
    def actors(self) -> list[Any]:
        return [spare.actor for spare in self._waiting]


def _ended(ref: ray.ObjectRef) -> RayError | Literal[True] | None:
    """Return the error of a finished call, or True for success; None if the call is pending."""
    if not ray.wait([ref], timeout=0)[0]:
        return None
    try:
        ray.get(ref)
    except RayError as error:
        return error
    return True


def _is_there(ref: ray.ObjectRef) -> bool:
    ready, _ = ray.wait([ref], timeout=0)
    try:
        return bool(ready and (ray.get(ref), True))
    except RayError:
        return True  # dead; the next query detects it
