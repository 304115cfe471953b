"""Number of additional processes that a cluster currently has room for."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence

from ray._private.state import state as ray_state

from raymm.actors.placement.node_types import Resources, staying_nodes

# Tolerance for amounts of resources, which are sums of fractions.
_EPSILON = 1e-6
# Seconds to wait for reserved resources to become free, and between two checks.
RELEASE_S, LOOK_S = 15.0, 0.2


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
