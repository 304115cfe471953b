"""Which way data goes through a graph, and how much of it at the same time."""

from enum import StrEnum

MESSAGE_BOUND = 4
"""Messages of one edge under way, sent and not yet received, where a program ends with so few: what
keeps a frozen encoder from running ahead of the rest by all of a step's microbatches."""


class Direction(StrEnum):
    """Outputs go forward, from producers to consumers; gradients of them go backward."""

    FORWARD = "forward"
    BACKWARD = "backward"
