"""Connections of this process that other processes opened."""

import socket

from raymm.actors.faults.cut import OwnConnections


def connected(listener):
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    return near, far


def test_only_connections_accepted_since_the_start_are_cut():
    with socket.create_server(("127.0.0.1", 0)) as before:
        connections = OwnConnections()
        with socket.create_server(("127.0.0.1", 0)) as later:
            kept, cut = connected(before), connected(later)
            assert connections.cut() == 1
            for end in cut:  # fails at once, instead of waiting
                assert end.recv(1) == b""
            for sender, receiver in (kept, kept[::-1]):
                sender.sendall(b"x")
                assert receiver.recv(1) == b"x"
            for end in (*kept, *cut):
                end.close()
