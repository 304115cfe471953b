"""Base class of actors that answer queries while they work."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import cache
from typing import Any, cast

from raymm.actors.faults.failure_kind import judging_errors
from raymm.actors.faults.stacks import Address, StackFile, error_log
from raymm.actors.faults.task_tracker import Report, TaskTracker
from raymm.actors.storage.seen import problem_seeing

# Each concurrency group has its own thread.
OBSERVE = "watch"
WRITE = "write"
HAND_OVER = "hand over"
KEEP = "keep"


@cache
def remote_class(actor_class: type[ObservedActor]) -> Any:
    """Return an actor's class wrapped by Ray. Cached, because exporting a class takes Ray longer
    than starting an actor. Imports Ray lazily."""
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
    """Base class of actors that a group observes.

    Args:
        describe: returns the text of an instruction of the actor's programs.

    Attributes:
        answers: methods that answer queries while the actor works.
        writes: methods that write files in the background.
        hands_over: methods that return data copied in memory.
        keeps: methods that store data of other processes.
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
        self.task_tracker = TaskTracker(describe)
        self._stack_file = StackFile()
        self._device_name = device

    def describe(self) -> dict[str, Any]:
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
        """Check that this process finds a file that the driver wrote (:func:`problem_seeing`)."""
        return problem_seeing(location, name, token)

    def where(self) -> Report:
        """Return the current operation; callable while the actor works."""
        return self.task_tracker.report()
