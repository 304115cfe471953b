"""What actors of all styles can be asked while they work."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

import ray

from raymm.actors.faults.stacks import Address, StackFile
from raymm.actors.faults.whereabouts import Report, Whereabouts

# Calls of this concurrency group have a thread of their own.
OBSERVE = "watch"
CONCURRENCY_GROUPS = {OBSERVE: 1}


class ObservedActor:
    """Base of actors that a group watches.

    Args:
        said: an instruction of its programs in words.

    Attributes:
        whereabouts: what it is doing.
    """

    def __init__(self, device: str, said: Callable[[Any], str] = str) -> None:
        self.whereabouts = Whereabouts(said)
        self._stack_file = StackFile()
        self._device_name = device

    @ray.method(concurrency_group=OBSERVE)
    def describe(self) -> dict[str, Any]:
        """Where this process lives."""
        address = Address(
            ray.get_runtime_context().get_node_id(), os.getpid(), self._stack_file.descriptor
        )
        return {
            "host": platform.node(), "pid": os.getpid(), "device": self._device_name,
            "address": address,
        }

    @ray.method(concurrency_group=OBSERVE)
    def where(self) -> Report:
        """What it is doing; answers while it does it."""
        return self.whereabouts.report()
