"""Processes that wait to take the places of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError

from raymm.actors.faults.heartbeats import BEAT_S
from raymm.actors.faults.inquiry import inquire


class Spare(NamedTuple):
    """An actor that has imported all that ranks need, the place that it has, and what it says once
    it is warm."""

    actor: Any
    place: Any
    warm: ray.ObjectRef


class Spares:
    """Warm processes, each in a place of its own.

    Args:
        places: for them.
    """

    def __init__(self, places: Sequence[Any] = ()) -> None:
        self._free = list(places)
        self._waiting: list[Spare] = []
        # Where each is, asked since a look before; by its `warm`.
        self._asked: dict[ray.ObjectRef, ray.ObjectRef] = {}

    def restock(self, start: Callable[[Any], tuple[Any, ray.ObjectRef]]) -> None:
        """Start one in every free place. Does not wait.

        Args:
            start: makes one in a place; says what it has returned once it is warm. It is not kept:
                it is a method of whoever has the spares, whose ranks end with the last name for it.
        """
        for place in self._free:
            actor, warm = start(place)
            self._waiting.append(Spare(actor, place, warm))
        self._free.clear()

    def look(self) -> None:
        """Let go of those that have died: their places are free. Does not wait; who has died since
        the last look may be found at the next one."""
        for spare in list(self._waiting):
            if spare.warm not in self._asked:
                self._asked[spare.warm] = spare.actor.where.remote()
            elif (error := _ended(self._asked[spare.warm])) is not None:
                del self._asked[spare.warm]
                if isinstance(error, RayActorError):
                    self._waiting.remove(spare)
                    self._free.append(spare.place)

    def take(self, most: int) -> list[Spare]:
        """Those that are warm and answer; they are no spares any more. Places of those that have
        died are free.

        Args:
            most: how many.
        """
        warm = [spare for spare in self._waiting if _is_there(spare.warm)]
        answers = inquire({number: spare.actor for number, spare in enumerate(warm)}, BEAT_S)
        for number in answers.dead:
            self._waiting.remove(warm[number])
            self._asked.pop(warm[number].warm, None)
            self._free.append(warm[number].place)
        taken = [warm[number] for number in sorted(answers.reports)[:most]]
        for spare in taken:
            self._waiting.remove(spare)
            self._asked.pop(spare.warm, None)
        return taken

    def has_warm(self) -> bool:
        """Whether one of them can be taken; one that has died, too, until somebody asks it."""
        return any(_is_there(spare.warm) for spare in self._waiting)

    def give(self, place: Any) -> None:
        """A place that nobody has any more.

        Args:
            place: as those of the class.
        """
        self._free.append(place)

    @property
    def actors(self) -> list[Any]:
        """Of all that wait."""
        return [spare.actor for spare in self._waiting]


def _ended(ref: ray.ObjectRef) -> RayError | Literal[True] | None:
    """Whether a call has ended, and how; None: it has not."""
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
        return True  # dead: whoever asks it finds that out
