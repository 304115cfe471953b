"""Which way data goes through a graph."""

from enum import StrEnum


class Direction(StrEnum):
    """Outputs go forward, from producers to consumers; gradients of them go backward."""

    FORWARD = "forward"
    BACKWARD = "backward"
