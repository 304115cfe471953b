"""Where ranks run, and what it is called when such a place is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import ray

from raymm.actors.placement.node_types import draining_nodes
from raymm.errors import ClusterLostError, NodeLostError, NodePreemptedError, RunFailedError


class ProcessSpec(Protocol):
    """What the group itself reads of its processes' specs."""

    @property
    def timeout_s(self) -> float: ...
    @property
    def peers(self) -> set[int]: ...


class RankPlace(NamedTuple):
    """Where a rank runs.

    Attributes:
        label: what runs there.
        host: name of its node.
        pid: of its process.
    """

    label: str
    host: str
    pid: int


def lost_node_error(nodes: frozenset[str], preempted: bool) -> Callable[[str], RunFailedError]:
    """The error, of a text, of losing nodes; without any, or with the driver's own, of losing the
    cluster.

    Args:
        nodes: Ray's ids.
        preempted: whether Ray says so of a process that was there.
    """
    if not nodes or ray.get_runtime_context().get_node_id() in nodes:
        return ClusterLostError
    announced = preempted or bool(nodes & draining_nodes().keys())
    return partial(NodePreemptedError if announced else NodeLostError, nodes=nodes)
