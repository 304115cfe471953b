"""Notices that a node is about to end: of spot instances, ``kubectl drain``
(:mod:`raymm.runtime.leave_node`) and autoscalers. Ray has no public call for them; Ray Train asks
in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from threading import Event, Thread

from ray._private.state import state as ray_state
from ray.exceptions import RayError

# Seconds between two looks.
INTERVAL_S = 1.0


def draining_nodes() -> dict[str, float | None]:
    """Ray's ids of nodes that are about to end, with the seconds that are left; None where nobody
    says. The one place that asks."""
    now = time.time()
    return {
        node: deadline / 1000 - now if deadline else None
        for node, deadline in ray_state.get_draining_nodes().items()
    }


class DrainObserver:
    """Looks for notices in a thread that does not keep this process from ending.

    Args:
        nodes: Ray's ids of the nodes that count.
        tell: is called once, from that thread, with a notice in words.
    """

    def __init__(self, nodes: Collection[str], tell: Callable[[str], None]) -> None:
        self._nodes, self._tell = frozenset(nodes), tell
        self._ended = Event()
        Thread(target=self._observe, name="drain-watch", daemon=True).start()

    def __enter__(self) -> DrainObserver:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()

    def _observe(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            try:
                notices = draining_nodes()
            except (RayError, RuntimeError, ValueError):
                continue  # whether the cluster is still there is for others to see
            left = {node: seconds for node, seconds in notices.items() if node in self._nodes}
            if left and not self._ended.is_set():
                self._tell(notice(left))
                return


def notice(left: dict[str, float | None]) -> str:
    """A notice in words, of nodes and the seconds that they have left."""
    parts = [
        f"the notice that node {node[:12]} ends"
        + ("" if seconds is None else f" in {max(seconds, 0.0):.0f} s")
        for node, seconds in sorted(left.items())
    ]
    return ", ".join(parts)
