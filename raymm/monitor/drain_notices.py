"""Notices that a node is about to end: from spot instances, ``kubectl drain``
(:mod:`raymm.runtime.leave_node`) and autoscalers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from threading import Event, Thread

from ray.exceptions import RayError

from raymm.actors.placement.node_types import draining_nodes

# Seconds between two checks for notices.
INTERVAL_S = 1.0


class DrainObserver:
    """Daemon thread that checks for notices. It calls a function once, with a notice as text."""

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
                continue  # other code detects a lost cluster
            draining = {node: seconds for node, seconds in notices.items() if node in self._nodes}
            if draining and not self._ended.is_set():
                self._tell(notice(draining))
                return


def notice(left: dict[str, float | None]) -> str:
    """Return a notice as text, from nodes and the seconds until they end."""
    phrases = [
        f"the notice that node {node[:12]} ends"
        + ("" if seconds is None else f" in {max(seconds, 0.0):.0f} s")
        for node, seconds in sorted(left.items())
    ]
    return ", ".join(phrases)
