"""Nodes of a cluster: the nodes that are running, and those that its autoscaler may add."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import _raylet
from ray._private.state import state as ray_state
from ray.core.generated import autoscaler_pb2
from ray.exceptions import RayError

# Their names are generated at compile time or import time, so type checkers do not know them.
raylet: Any = _raylet
autoscaler: Any = autoscaler_pb2
# KubeRay sets the RayCluster's name in every pod; Kubernetes provides the namespace in a file.
CLUSTER_VARIABLE = "RAY_CLUSTER_NAME"
GROUP_LABEL = "ray.io/node-group"  # label of a node that names its type
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# Timeout for Ray's server to report the autoscaler's state, in seconds.
ANSWER_TIMEOUT_S = 5
# Tolerance for amounts of resources, which are sums of fractions.
_EPSILON = 1e-9

# Resources that messages omit: memory, and Ray's internal names of reserved bundles.
_UNSAID = "memory|_group_"

Resources = Mapping[str, float]


@dataclass(frozen=True)
class NodeType:
    """Type of nodes; ``most`` is the largest number of its nodes."""

    name: str
    resources: Resources
    most: float

    def holds(self, bundle: Resources) -> int:
        """Return the number of bundles that fit on a node."""
        return int(min(
            (self.resources.get(name, 0.0) + _EPSILON) // amount
            for name, amount in bundle.items() if amount > 0
        ))


def autoscaled_types() -> tuple[NodeType, ...]:
    """Return the types of nodes that the autoscaler may add; empty without one, or if they are
    unknown."""
    config = ray_state.get_cluster_config()
    if config is not None and config.node_group_configs:
        return types_of(config.node_group_configs)
    return kuberay_types()


def has_autoscaler() -> bool:
    """Return True if an autoscaler adds nodes to the connected cluster on request."""
    return bool(autoscaled_types()) or _autoscaling_state() is not None


def kuberay_types() -> tuple[NodeType, ...]:
    """Return the worker groups of the RayCluster that this process runs in, as Ray's autoscaler
    reads them from the Kubernetes API, which the head's pod may query. Empty elsewhere."""
    cluster = os.environ.get(CLUSTER_VARIABLE)
    if not cluster or "KUBERNETES_SERVICE_HOST" not in os.environ:
        return ()
    from ray.autoscaler._private.kuberay import autoscaling_config as kuberay
    from ray.autoscaler._private.kuberay.node_provider import KubernetesHttpApiClient

    try:
        namespace = NAMESPACE_FILE.read_text().strip() if NAMESPACE_FILE.is_file() else "default"
        manifest = KubernetesHttpApiClient(namespace=namespace).get(f"rayclusters/{cluster}")
        if not manifest["spec"].get("enableInTreeAutoscaling"):
            return ()
        config = kuberay._derive_autoscaling_config_from_ray_cr(manifest)
    except Exception:  # a worker's pod has no permission, and Ray's interface may change
        return ()
    return tuple(
        NodeType(name, group["resources"], group["max_workers"])
        for name, group in config["available_node_types"].items() if group["max_workers"]
    )


def types_of(groups: Iterable[Any]) -> tuple[NodeType, ...]:
    """Convert the node groups that an autoscaler has reported (``autoscaler.proto``,
    ``NodeGroupConfig``)."""
    return tuple(
        NodeType(
            group.name, {name: float(amount) for name, amount in group.resources.items()},
            math.inf if group.max_count < 0 else group.max_count,
        )
        for group in groups if group.max_count
    )


def all_types() -> tuple[NodeType, ...]:
    """Return the types that the autoscaler may add, and one type for each other node that stays."""
    types = autoscaled_types()
    names = {node_type.name for node_type in types}
    return types + tuple(
        NodeType(node["NodeName"], node["Resources"], 1)
        for node in staying_nodes() if node["Labels"].get(GROUP_LABEL) not in names
    )


def draining_nodes() -> dict[str, float | None]:
    """Return Ray ids of nodes that are about to end, with the seconds left, or None if unknown. Ray
    has no public call for this; Ray Train uses the same internal one."""
    now = time.time()
    return {
        node: deadline / 1000 - now if deadline else None
        for node, deadline in ray_state.get_draining_nodes().items()
    }


def staying_nodes() -> list[dict[str, Any]]:
    """Return the nodes that are alive and not about to end, in the form of ``ray.nodes()``."""
    leaving = draining_nodes()
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in leaving]


def reachable_resources() -> dict[str, float]:
    """Return the resources of the connected cluster when all possible nodes are running."""
    total: dict[str, float] = {}
    for node_type in all_types():
        for name, amount in node_type.resources.items():
            if amount > 0:
                total[name] = total.get(name, 0.0) + amount * node_type.most
    return total


def without_room(bundles: Sequence[Resources], types: Sequence[NodeType]) -> str | None:
    """Return the reason why bundles can never be placed together; None if no reason is found. Only
    Ray can determine if all of them fit."""
    counts: dict[tuple[tuple[str, float], ...], int] = {}
    for bundle in bundles:
        key = tuple(sorted(bundle.items()))
        counts[key] = counts.get(key, 0) + 1
    largest = ", ".join(f"{kind.name} ({spell(kind.resources)})" for kind in types) or "none"
    for key, count in counts.items():
        bundle = dict(key)
        room = sum(kind.most * held for kind in types if (held := kind.holds(bundle)))
        if not room:
            return f"no node type has room for {spell(bundle)}; node types: {largest}"
        if count > room:
            return (
                f"{count} x {spell(bundle)} do not fit: there is room for {room:g} when all nodes "
                f"are running; node types: {largest}, at most "
                f"{', '.join(f'{node_type.most:g} {node_type.name}' for node_type in types)}"
            )
    return None


def spell(resources: Resources) -> str:
    """Return resources as text: ``7 CPU, 1 GPU``."""
    plain = {
        name: amount for name, amount in resources.items()
        if not name.startswith(("node:", "accelerator_type:")) and not re.search(_UNSAID, name)
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(plain.items())) or "nothing"


def pending_nodes() -> dict[str, int]:
    """Return the nodes that the autoscaler has requested and that are not running yet, by type."""
    state = _autoscaling_state()
    counts: dict[str, int] = {}
    for request in () if state is None else state.pending_instance_requests:
        name = request.ray_node_type_name
        counts[name] = counts.get(name, 0) + request.count
    for instance in () if state is None else state.pending_instances:
        name = instance.ray_node_type_name
        counts[name] = counts.get(name, 0) + 1
    return counts


def _autoscaling_state() -> Any:
    """Return the state that the autoscaler (v2) has reported to Ray's server; None if it has
    not."""
    try:
        client = raylet.GcsClient(ray.get_runtime_context().gcs_address)
        reply = autoscaler.GetClusterStatusReply.FromString(
            client.get_cluster_status(timeout_s=ANSWER_TIMEOUT_S)
        )
    except (RayError, RuntimeError):  # the server does not answer; other code reports that
        return None
    return reply.autoscaling_state if reply.HasField("autoscaling_state") else None
