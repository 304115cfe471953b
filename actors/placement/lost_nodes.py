"""Telling Ray of nodes that are lost, which it would find out by itself some 15 s later.

Until then it looks for no other places for what was there. Its raylet says so of itself when it
ends in an orderly way (``NodeInfoGcsService.UnregisterNode`` of Ray's own interface between
servers); of one that was killed somebody else has to.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ray

# Seconds that Ray's server may take to hear it.
TELL_TIMEOUT_S = 5.0
REASON = "its Ray server (raylet) does not listen any more, says raymm"


def tell_ray(nodes: Collection[str]) -> bool:
    """Tell the cluster's server that nodes are gone, as far as it does not know; whether it has
    heard it. Where Ray has changed how that is said, it finds out by itself.

    Args:
        nodes: Ray's ids of nodes whose servers were there, and refuse connections now: a raylet
            that is told it is dead ends, should it be there after all.
    """
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] in nodes]
    if not alive:
        return True
    try:
        from ray._private.grpc_utils import init_grpc_channel
        from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

        # Any: neither Ray's nor gRPC's types say what these have.
        messages: Any = gcs_service_pb2
        connected: Any = init_grpc_channel(ray.get_runtime_context().gcs_address)
        with connected as channel:
            server = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            for node in alive:
                request = messages.UnregisterNodeRequest(node_id=bytes.fromhex(node))
                death = request.node_death_info
                death.reason, death.reason_message = death.UNEXPECTED_TERMINATION, REASON
                server.UnregisterNode(request, timeout=TELL_TIMEOUT_S)
    except Exception:  # of Ray's own interface, which may be another one in the next version
        return False
    return True
