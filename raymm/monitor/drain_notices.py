"""Notices that a node is about to end: of spot instances, ``kubectl drain``
(:mod:`raymm.runtime.leave_node`) and autoscalers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from threading import Event, Thread

from ray.exceptions import RayError

from raymm.actors.placement.node_types import draining_nodes

# Seconds between two looks.
INTERVAL_S = 1.0


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
