"""What actors of all styles can be asked while they work."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import cache
from typing import Any, cast

from raymm.actors.faults.failure_kind import judging_errors
from raymm.actors.faults.stacks import Address, StackFile, error_log
from raymm.actors.faults.whereabouts import Report, Whereabouts
from raymm.actors.storage.seen import problem_seeing

# Calls of each of these concurrency groups have a thread of their own.
OBSERVE = "watch"
WRITE = "write"
HAND_OVER = "hand over"
KEEP = "keep"


@cache
def remote_class(actor_class: type[ObservedActor]) -> Any:
    """An actor's class as Ray starts it; where no actor is started, Ray is not needed. The same for
    every actor: Ray exports each one that it gets, which takes longer than starting an actor."""
    import ray

    groups = {
        OBSERVE: actor_class.answers, WRITE: actor_class.writes,
        HAND_OVER: actor_class.hands_over, KEEP: actor_class.keeps,
    }
    for group, methods in groups.items():
        for name in methods:
            ray.method(concurrency_group=group)(getattr(actor_class, name))
    return cast(Any, ray.remote)(concurrency_groups=dict.fromkeys(groups, 1))(actor_class)


class ObservedActor:
    """Base of actors that a group watches.

    Args:
        describe: returns the text of an instruction of the actor's programs.

    Attributes:
        whereabouts: what it is doing.
        answers: methods that answer while it does it.
        writes: those that write files meanwhile.
        hands_over: those that hand over what was copied in memory.
        keeps: those that keep what others have handed over.
    """

    answers: tuple[str, ...] = ("describe", "where")
    writes: tuple[str, ...] = ()
    hands_over: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            constructor: Any = judging_errors(cls.__init__)
            cls.__init__ = constructor

    def __init__(self, device: str, describe: Callable[[Any], str] = str) -> None:
        self.whereabouts = Whereabouts(describe)
        self._stack_file = StackFile()
        self._device_name = device

    def describe(self) -> dict[str, Any]:
        """Where this process lives."""
        import ray

        address = Address(
            ray.get_runtime_context().get_node_id(), os.getpid(), self._stack_file.descriptor,
            error_log(),
        )
        return {
            "host": platform.node(), "pid": os.getpid(), "device": self._device_name,
            "address": address,
        }

    def sees(self, location: str, name: str, token: str) -> str | None:
        """Whether this process finds what the driver wrote (:func:`problem_seeing`).

        Args:
            location: of the run's folder.
            name: of a file in it.
            token: what is in that file.
        """
        return problem_seeing(location, name, token)

    def where(self) -> Report:
        """What it is doing; answers while it does it."""
        return self.whereabouts.report()
