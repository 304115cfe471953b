"""One reservation for all processes of a run, and the wait for the nodes that it needs.

All resources are requested at once: separate requests could each cost a node, and no process should
start before all of them can.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray
from ray._private.state import state as ray_state
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raymm.actors.placement.node_types import (
    Resources,
    has_autoscaler,
    pending_nodes,
    spell,
    staying_nodes,
)
from raymm.errors import ClusterError
from raymm.scheduler.plan.rank_nodes import RankNodes, rank_nodes
from raymm.scheduler.plan.stage import Degrees

# Timeout of the report, in seconds.
TELL_TIMEOUT_S = 5.0
REASON = "its Ray server (raylet) does not listen any more, says raymm"
# Tolerance for amounts of resources, which are sums of fractions.
_EPSILON = 1e-6
# Seconds to wait for reserved resources to become free, and between two checks.
RELEASE_S, LOOK_S = 15.0, 0.2


def tell_ray(nodes: Collection[str]) -> bool:
    """Report lost nodes to the cluster's control server, unless it knows of them. Return False if
    the report failed, for example because Ray has changed its interface.

    Args:
        nodes: Ray ids of nodes that were reachable and now refuse connections. A raylet that is
            still alive ends itself when it is reported as dead.
    """
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] in nodes]
    if not alive:
        return True
    try:
        from ray._private.grpc_utils import init_grpc_channel
        from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

        # Any: Ray and gRPC do not declare these attributes.
        messages: Any = gcs_service_pb2
        connected: Any = init_grpc_channel(ray.get_runtime_context().gcs_address)
        with connected as channel:
            server = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            for node in alive:
                request = messages.UnregisterNodeRequest(node_id=bytes.fromhex(node))
                death = request.node_death_info
                death.reason, death.reason_message = death.UNEXPECTED_TERMINATION, REASON
                server.UnregisterNode(request, timeout=TELL_TIMEOUT_S)
    except Exception:  # Ray's internal interface may change in the next version
        return False
    return True


# Timeout of a placement group when all nodes are running and large enough, in seconds.
PLACEMENT_TIMEOUT_S = 120.0
# Seconds to wait for nodes of an autoscaler: a GPU machine and its image take minutes.
WAIT_FOR_NODES_S = 1800.0
# Seconds between two log lines about the wait.
LINE_EVERY_S = 10.0
# Seconds for Ray to move the places of a lost node if no autoscaler adds nodes, and between two
# checks. Ray detects an unreported loss after about 15 s.
MOVE_TIMEOUT_S, MOVE_LOOK_S = 40.0, 0.1
# Seconds to wait for Ray to release places. A call to a lost GCS returns after a minute, or ends
# this process.
RELEASE_S = 10.0
# Checks, a second apart, before the request is rejected because this process holds the resources:
# resources that were just released become free a moment later.
LOOKS = 2
# Placements of this process that are still referenced.
_of_this_process: weakref.WeakSet[Placement] = weakref.WeakSet()

Bundle = Mapping[str, float]


@dataclass(frozen=True)
class PlacementOptions:
    """Resources that are reserved in addition to the ranks', and how long nodes may take to arrive.

    Attributes:
        spares: number of spare processes, each with a rank's resources.
        degrees: degrees of each rank, whose processes are placed on one node if possible. Empty to
            place processes in the order of the bundles.
        wait_for_nodes_s: seconds to wait for nodes; None for :data:`WAIT_FOR_NODES_S` with an
            autoscaler, and no wait without one.
        say: called with a line of text while nodes are awaited.
        check: called between two checks for nodes; an error that it raises ends the wait.
    """

    worker_bundles: tuple[Bundle, ...] = ()
    spares: int = 0
    degrees: tuple[Degrees, ...] = ()
    wait_for_nodes_s: float | None = None
    say: Callable[[str], None] = print
    check: Callable[[], None] = lambda: None

    def bundles_beside(self, rank: Bundle) -> tuple[Bundle, ...]:
        return (*(rank,) * self.spares, *self.worker_bundles)

    def waits(self) -> float:
        """Return the seconds to wait for nodes of the connected cluster; 0 if the nodes must be
        running."""
        if self.wait_for_nodes_s is not None:
            return self.wait_for_nodes_s
        return WAIT_FOR_NODES_S if has_autoscaler() else 0.0


ONLY_RANKS = PlacementOptions()


class Placement:
    """Reserved places, one per process. An unreferenced placement is released."""

    def __init__(self, bundles: Sequence[Bundle], options: PlacementOptions) -> None:
        self._bundles = [dict(each) for each in (*bundles, *options.bundles_beside(bundles[0]))]
        self._first_beside = len(bundles)
        self._options, self._waits = options, options.waits()
        self._group = placement_group(self._bundles, strategy="PACK")
        # A model may be garbage-collected during a call of Ray. A nested call would deadlock, so
        # another thread makes it.
        self._remove = weakref.finalize(self, call_behind, _remove_group, self._group)
        self._remove.atexit = False  # Ray releases it at exit
        _of_this_process.add(self)

    @property
    def is_held(self) -> bool:
        return self._remove.alive

    def wait(self) -> None:
        """Wait until all places are reserved. Raise a ``ClusterError`` if the places are not
        available in time, or this process itself holds the missing resources."""
        start = time.monotonic()
        patience = self._waits or PLACEMENT_TIMEOUT_S
        line_due = start + LINE_EVERY_S
        looks = 0
        # In slices, so that Ctrl-C is handled. Not ready(), whose task takes a worker process.
        while not self._group.wait(1.0):
            self._options.check()
            now = time.monotonic()
            if not self._waits and (earlier := self._earlier_with_what_lacks()):
                looks += 1
                _let_go_of_errors()
                if looks > LOOKS:
                    raise ClusterError(self._held_by(earlier))
            if now - start > patience:
                raise ClusterError(self._too_late(patience))
            if self._waits and now >= line_due:
                line_due += LINE_EVERY_S
                self._options.say(
                    f"waiting for nodes, {now - start:.0f} s: {_there()}; requested: "
                    f"{_counted(self._bundles)}; at most {patience:g} s (run.wait_for_nodes_s)"
                )

    @cached_property
    def _arranged(self) -> RankNodes:
        """Return the nodes and places of the plan's processes; known once the places are
        reserved."""
        table: Any = placement_group_table(self._group)
        nodes = [table["bundles_to_node_id"][bundle] for bundle in range(self._first_beside)]
        return rank_nodes(self._options.degrees or (Degrees(),) * len(nodes), nodes)

    @property
    def process_nodes(self) -> tuple[int, ...]:
        return self._arranged.nodes

    def place(self, process: int) -> PlacementGroupSchedulingStrategy:
        return self._at(self._arranged.places[process])

    @property
    def worker_places(self) -> tuple[PlacementGroupSchedulingStrategy, ...]:
        first = self._first_beside + self._options.spares
        return tuple(self._at(n) for n in range(first, len(self._bundles)))

    @property
    def spare_places(self) -> tuple[PlacementGroupSchedulingStrategy, ...]:
        return tuple(self._at(self._first_beside + n) for n in range(self._options.spares))

    def _at(self, place: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)

    def nodes(self) -> frozenset[str]:
        """Return Ray ids of the nodes with reserved places; known once the places are reserved."""
        table: Any = placement_group_table(self._group)
        return frozenset(table["bundles_to_node_id"].values())

    def leave(self, nodes: frozenset[str]) -> None:
        """Wait until Ray has moved the places that were on lost nodes. Raise a ``ClusterError`` if
        Ray found no other places in time."""
        tell_ray(nodes)
        deadline = time.monotonic() + (self._waits or MOVE_TIMEOUT_S)
        while True:
            table: Any = placement_group_table(self._group)
            if table["state"] == "CREATED" and not nodes & set(
                table["bundles_to_node_id"].values()
            ):
                return
            self._options.check()
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"Ray found no other nodes for the lost processes: {_there()}; "
                    f"{_counted(self._bundles)} are needed in total"
                )
            time.sleep(MOVE_LOOK_S)

    def held(self) -> dict[str, dict[str, float]]:
        """Return the reserved resources by Ray node id."""
        table: Any = placement_group_table(self._group)
        total: dict[str, dict[str, float]] = {}
        for index, node in table["bundles_to_node_id"].items():
            amounts = total.setdefault(node, {})
            for name, amount in self._bundles[index].items():
                amounts[name] = amounts.get(name, 0.0) + amount
        return total

    def remove(self) -> None:
        """Release all places; wait at most :data:`RELEASE_S` for that."""
        if self._remove.detach() is not None:
            call_behind(_remove_group, self._group).join(RELEASE_S)

    def _earlier_with_what_lacks(self) -> list[Placement]:
        """Return other placements of this process that hold resources which this placement
        lacks."""
        candidates = [
            candidate for candidate in _of_this_process
            if candidate.is_held and candidate is not self
        ]
        if not candidates:
            return []
        free = ray.available_resources()
        needed = _total(self._bundles)
        lacking = {name for name, amount in needed.items() if amount > free.get(name, 0.0) + 1e-9}
        return [candidate for candidate in candidates if lacking & set(_total(candidate._bundles))]

    def _held_by(self, earlier: Sequence[Placement]) -> str:
        held = _counted([bundle for placement in earlier for bundle in placement._bundles])
        return (
            f"{_counted(self._bundles)} are needed, but an earlier model of this process still "
            f"holds {held} of the cluster's {spell(ray.cluster_resources())}. Release it first: "
            "call shutdown() on the result of apply(), or delete the variable; a notebook also "
            "keeps the results of its cells (Out) until %reset -f out"
        )

    def _too_late(self, patience: float) -> str:
        text = f"{_counted(self._bundles)} could not be placed within {patience:g} s"
        if self._waits:
            return (
                f"{text} (run.wait_for_nodes_s): {_there()}. Check the autoscaler "
                "(`ray status`; on Kubernetes `kubectl get pods` and the head's container "
                "'autoscaler'), or raise the limit"
            )
        return f"{text}; free in the cluster now: {ray.available_resources()}"


def _remove_group(group: PlacementGroup) -> None:
    if ray.is_initialized():
        remove_placement_group(group)


def call_behind(release: Callable[..., Any], *args: Any) -> threading.Thread:
    """Call a function in a daemon thread, because a call of Ray to a lost cluster may not
    return."""
    thread = threading.Thread(target=release, args=args, name="raymm-places", daemon=True)
    thread.start()
    return thread


def _let_go_of_errors() -> None:
    """Release objects that the frames of the last displayed error refer to, such as an interrupted
    model."""
    traceback.clear_frames(getattr(sys, "last_traceback", None))
    gc.collect()


def _total(bundles: Sequence[Bundle]) -> Counter[str]:
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(bundle)
    return total


def _counted(bundles: Sequence[Bundle]) -> str:
    counts = Counter(spell(bundle) for bundle in bundles)
    return " and ".join(f"{count} x ({text})" for text, count in counts.items())


def _there() -> str:
    alive = [node for node in ray.nodes() if node["Alive"]]
    total: dict[str, float] = {}
    for node in alive:
        for name, amount in node["Resources"].items():
            total[name] = total.get(name, 0.0) + amount
    pending = ", ".join(f"{count} {name}" for name, count in sorted(pending_nodes().items()))
    noun = "node" if len(alive) == 1 else "nodes"
    return f"{len(alive)} {noun} running ({spell(total)}), pending: {pending or 'none'}"


def free_resources(held: Mapping[str, Resources] | None = None) -> dict[str, dict[str, float]]:
    """Return the free resources of the nodes that stay, by Ray node id; ``held`` counts as free,
    too."""
    staying = {node["NodeID"] for node in staying_nodes()}
    free = {
        node: dict(amounts) for node, amounts in ray_state.available_resources_per_node().items()
        if node in staying
    }
    for node, amounts in (held or {}).items():
        for name, amount in amounts.items() if node in free else ():
            free[node][name] = free[node].get(name, 0.0) + amount
    return free


def wait_for_release(held: Mapping[str, Resources]) -> None:
    """Wait until reserved resources are free again on the nodes that stay, for at most
    :data:`RELEASE_S`: another process may have taken them."""
    deadline = time.monotonic() + RELEASE_S
    while time.monotonic() < deadline:
        free = free_resources()
        if all(
            free[node].get(name, 0.0) >= amount - _EPSILON
            for node, amounts in held.items() if node in free for name, amount in amounts.items()
        ):
            return
        time.sleep(LOOK_S)


def count_places(
    nodes: Iterable[Resources], bundle: Resources, others: Sequence[Resources] = ()
) -> int:
    """Return the number of bundles that fit into the free resources of nodes, after placing the
    bundles ``others``, each on the node where it costs the fewest places."""
    free = [dict(node) for node in nodes]
    for extra in others:
        fitting = [node for node in free if _holds(node, extra)]
        if not fitting:
            return 0
        lost = [_holds(node, bundle) - _holds(_less(node, extra), bundle) for node in fitting]
        best = fitting[lost.index(min(lost))]
        best.update(_less(best, extra))
    return sum(_holds(node, bundle) for node in free)


def _holds(node: Resources, bundle: Resources) -> int:
    return min(
        math.floor((node.get(name, 0.0) + _EPSILON) / amount)
        for name, amount in bundle.items() if amount > 0
    )


def _less(node: Resources, bundle: Resources) -> dict[str, float]:
    return {name: amount - bundle.get(name, 0.0) for name, amount in node.items()}
