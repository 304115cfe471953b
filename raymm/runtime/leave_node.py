"""``python -m raymm.runtime.leave_node``: drain this node, and wait until nothing runs on it.

For the preStop hook of a pod: see ``deploy/``. A run with ranks on the node is notified
(:mod:`raymm.monitor.drain_notices`), finishes its step, saves and leaves. Ray places nothing new on
the node, and ends it when it is empty.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from ray import _raylet
from ray._private import services
from ray.core.generated import autoscaler_pb2, gcs_pb2

# Type checkers do not see their names, which are generated at compile or import time.
raylet: Any = _raylet
autoscaler: Any = autoscaler_pb2
gcs: Any = gcs_pb2

# Name of the pod's node in the cluster; KubeRay sets it to the pod's name.
INSTANCE_VARIABLE = "RAY_CLOUD_INSTANCE_ID"
# Seconds between two checks of the node, and the timeout of one check.
INTERVAL_S = 0.5
ANSWER_TIMEOUT_S = 10.0


def leave(client: Any, instance: str, seconds: float) -> str:
    """Announce the end of a node and wait until it is vacated.

    Args:
        seconds: time until the node ends even if it is in use.

    Returns:
        A sentence about the outcome.
    """
    node = _node(client, instance)
    if node is None:
        return f"the cluster has no node {instance} (any more)"
    deadline = time.time() + seconds
    accepted, reason = client.drain_node(
        node, autoscaler.DRAIN_NODE_REASON_PREEMPTION, f"the pod {instance} ends",
        int(deadline * 1000),
    )
    if not accepted:
        return f"node {instance} could not be drained: {reason}"
    start = time.monotonic()
    while time.time() < deadline:
        if _node(client, instance) is None:
            return f"node {instance} was vacated after {time.monotonic() - start:.1f} s"
        time.sleep(INTERVAL_S)
    return f"something still runs on node {instance} after {seconds:g} s"


def _node(client: Any, instance: str) -> str | None:
    for node in client.get_all_node_info(timeout=ANSWER_TIMEOUT_S).values():
        if node.instance_id == instance and node.state == gcs.GcsNodeInfo.ALIVE:
            return node.node_id.hex()
    return None


def main() -> int:
    """Run the command line. Returns 0 in any case, because a preStop hook's exit code changes
    nothing."""
    parser = argparse.ArgumentParser(description="Announce that this node is about to end.")
    parser.add_argument("--seconds", type=float, required=True, help="time until the node ends")
    seconds = parser.parse_args().seconds
    instance = os.environ.get(INSTANCE_VARIABLE)
    if not instance:
        print(f"{INSTANCE_VARIABLE} is not set; set it to the name of this node", file=sys.stderr)
        return 0
    address = services.canonicalize_bootstrap_address_or_die("auto")  # RAY_ADDRESS if set
    client = raylet.GcsClient(address=address)
    print(leave(client, instance, seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
