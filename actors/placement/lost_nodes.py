"""Report of lost nodes to Ray, which would detect them by itself about 15 s later.

Until then Ray does not move the placements of a lost node. A raylet that shuts down cleanly reports
itself (``NodeInfoGcsService.UnregisterNode``, Ray's internal interface); another process has to
report a raylet that was killed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ray

# Timeout of the report, in seconds.
TELL_TIMEOUT_S = 5.0
REASON = "its Ray server (raylet) does not listen any more, says raymm"


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
