"""Base class of actors that answer queries while they work."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Callable
from functools import cache
from typing import Any, cast

from raymm.actors.faults.failure_kind import judging_errors
from raymm.actors.faults.stacks import Address, StackFile, error_log
from raymm.actors.faults.task_tracker import Report, TaskTracker
from raymm.actors.storage.folder import PARTIAL
from raymm.actors.storage.location import storage_folder

# Each concurrency group has its own thread.
OBSERVE = "watch"
WRITE = "write"
HAND_OVER = "hand over"
KEEP = "keep"
# Seconds until a file must be visible on other machines: NFS caches folders for some seconds.
SEEN_WITHIN_S = 10.0
# Seconds between two checks.
LOOK_S = 0.2
# An unreachable bucket is reported earlier at the start than during a run.
RETRY_FOR_S = 10.0


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


def problem_seeing(location: str, name: str, token: str) -> str | None:
    """Look for a file with the content ``token`` that another process wrote, and write a temporary
    one.

    Returns:
        The problem, as the rest of a sentence that starts with the name of this process; None if
        there is no problem.
    """
    deadline = time.monotonic() + SEEN_WITHIN_S
    trial_file = f".seen-by-{secrets.token_hex(16)}{PARTIAL}"
    try:
        folder = storage_folder(location, RETRY_FOR_S)
        while True:
            try:
                seen = folder.read(name)
                break
            except (FileNotFoundError, NotADirectoryError) as error:
                if time.monotonic() > deadline:
                    return f"does not find the file that the driver wrote there ({error.strerror})"
            time.sleep(LOOK_S)
        if seen != token.encode():
            return "finds a different file there than the driver wrote"
        folder.replace(trial_file, b"")
        folder.unlink(trial_file)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        return f"cannot use it: {error}"
    return None
