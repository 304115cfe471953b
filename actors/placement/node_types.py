"""The nodes of a cluster: those that are there, and those that its autoscaler may bring."""

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

# Their names are made when they are compiled, or imported: type checkers see none.
raylet: Any = _raylet
autoscaler: Any = autoscaler_pb2
# Set by KubeRay in every pod: the RayCluster's name; and where Kubernetes says in which namespace.
CLUSTER_VARIABLE = "RAY_CLUSTER_NAME"
GROUP_LABEL = "ray.io/node-group"  # of a node: its type
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# Seconds that Ray's server may take to say what the autoscaler does.
ANSWER_TIMEOUT_S = 5
# Amounts of resources are sums of fractions.
_EPSILON = 1e-9

# Resources that say nothing to a person: memory, and what Ray makes of reserved bundles.
_UNSAID = "memory|_group_"

Resources = Mapping[str, float]


@dataclass(frozen=True)
class NodeType:
    """A type of nodes.

    Attributes:
        name: of the worker group.
        resources: of each node.
        most: how many there can be.
    """

    name: str
    resources: Resources
    most: float

    def holds(self, bundle: Resources) -> int:
        """How many bundles a node has room for."""
        return int(min(
            (self.resources.get(name, 0.0) + _EPSILON) // amount
            for name, amount in bundle.items() if amount > 0
        ))


def autoscaled_types() -> tuple[NodeType, ...]:
    """The types of nodes that the connected cluster's autoscaler may bring; none without one, and
    where it does not say."""
    config = ray_state.get_cluster_config()
    if config is not None and config.node_group_configs:
        return types_of(config.node_group_configs)
    return kuberay_types()


def has_autoscaler() -> bool:
    """Whether somebody brings nodes to the connected cluster when they are asked for."""
    return bool(autoscaled_types()) or _autoscaling_state() is not None


def kuberay_types() -> tuple[NodeType, ...]:
    """The worker groups of the RayCluster that this process is in, as Ray's autoscaler reads them:
    from the Kubernetes API, which the head's pod may ask. None elsewhere."""
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
    except Exception:  # a worker's pod may not ask, and Ray may change: then types are not known
        return ()
    return tuple(
        NodeType(name, group["resources"], group["max_workers"])
        for name, group in config["available_node_types"].items() if group["max_workers"]
    )


def types_of(groups: Iterable[Any]) -> tuple[NodeType, ...]:
    """Of what an autoscaler has told Ray's server (``autoscaler.proto``, ``NodeGroupConfig``)."""
    return tuple(
        NodeType(
            group.name, {name: float(amount) for name, amount in group.resources.items()},
            math.inf if group.max_count < 0 else group.max_count,
        )
        for group in groups if group.max_count
    )


def all_types() -> tuple[NodeType, ...]:
    """Those that may come, and every node that stays and is of none of them."""
    types = autoscaled_types()
    names = {node_type.name for node_type in types}
    return types + tuple(
        NodeType(node["NodeName"], node["Resources"], 1)
        for node in staying_nodes() if node["Labels"].get(GROUP_LABEL) not in names
    )


def draining_nodes() -> dict[str, float | None]:
    """Ray's ids of nodes that are about to end, with the seconds that are left; None where nobody
    says. Ray has no public call for it; Ray Train asks in the same way. The one place that asks."""
    now = time.time()
    return {
        node: deadline / 1000 - now if deadline else None
        for node, deadline in ray_state.get_draining_nodes().items()
    }


def staying_nodes() -> list[dict[str, Any]]:
    """The nodes that are there and not about to end, as ``ray.nodes()`` has them."""
    leaving = draining_nodes()
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in leaving]


def reachable_resources() -> dict[str, float]:
    """What the connected cluster has when all nodes are there that may come."""
    total: dict[str, float] = {}
    for node_type in all_types():
        for name, amount in node_type.resources.items():
            if amount > 0:
                total[name] = total.get(name, 0.0) + amount * node_type.most
    return total


def without_room(bundles: Sequence[Resources], types: Sequence[NodeType]) -> str | None:
    """Why bundles can never be placed together; None if that cannot be told: whether all of them
    fit is for Ray to find out.

    Args:
        bundles: what processes reserve, each on one node.
        types: of nodes.
    """
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
    """Resources in words: ``7 CPU, 1 GPU``."""
    plain = {
        name: amount for name, amount in resources.items()
        if not name.startswith(("node:", "accelerator_type:")) and not re.search(_UNSAID, name)
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(plain.items())) or "nothing"


def pending_nodes() -> dict[str, int]:
    """Nodes that the autoscaler has asked for and that are not there yet, by type; empty where it
    does not say."""
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
    """What the autoscaler (v2) has told Ray's server of what it does; None if nothing."""
    try:
        client = raylet.GcsClient(ray.get_runtime_context().gcs_address)
        reply = autoscaler.GetClusterStatusReply.FromString(
            client.get_cluster_status(timeout_s=ANSWER_TIMEOUT_S)
        )
    except (RayError, RuntimeError):  # the server does not answer: others will say so
        return None
    return reply.autoscaling_state if reply.HasField("autoscaling_state") else None
