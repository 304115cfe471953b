"""Selection of the cluster that raymm connects to."""

import pytest
import ray

from raymm.errors import ClusterError
from raymm.runtime.cluster import connect


def test_a_ray_client_is_refused_with_a_message(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    # the session's cluster may be connected
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ClusterError, match="ray://head:10001.* RAY_ADDRESS=auto "):
        connect()
