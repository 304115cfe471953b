"""Nodes whose servers no longer listen."""

import socket

from raymm.actors.faults.cluster_observer import ClusterObserver, Server, refuses


def listening() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(8)
    return listener


def observer(*listeners: socket.socket) -> ClusterObserver:
    """Return an observer without its thread, and without Ray."""
    made = ClusterObserver.__new__(ClusterObserver)
    made._servers = {
        f"node {number}": Server(*listener.getsockname(), f"host{number}")
        for number, listener in enumerate(listeners)
    }
    made._refused = dict.fromkeys(made._servers, 0)
    made.lost, made.lost_nodes = None, frozenset()
    return made


def test_lost_nodes_are_found_together():
    with listening() as first, listening() as second, listening() as third:
        looking = observer(first, second, third)
        looking.look_at_nodes()
        assert looking.lost is None and looking.lost_nodes == frozenset()
        second.close()
        third.close()
        looking.look_at_nodes()
    assert looking.lost_nodes == {"node 1", "node 2"}
    assert looking.lost is not None and "host1" in looking.lost and "host2" in looking.lost
    assert "host0" not in looking.lost and "does not listen any more" in looking.lost


def test_a_node_that_was_never_reached_is_not_lost():
    """Check that a firewall between this process and a node does not count as a loss."""
    with listening() as first, listening() as second:
        looking = observer(first, second)
        second.close()
        assert refuses(looking._servers["node 1"])
        del looking._refused["node 1"]
        looking.look_at_nodes()
    assert looking.lost is None
