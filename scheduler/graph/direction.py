"""Which way data goes through a graph, and how much of it at the same time."""

from enum import StrEnum

MESSAGE_BOUND = 4
"""Messages of one edge under way, sent and not yet received, where a program ends with so few: what
keeps a frozen encoder from running ahead of the rest by all of a step's microbatches."""


def posted_receives(in_order: bool) -> int:
    """Messages of one edge whose buffers a receiver has while it computes, the one that it works
    on among them.

    Args:
        in_order: receives are posted just when their sender sends
            (:mod:`raymm.scheduler.program.issue_order`), as on a GPU; else as many are posted at
            once as may be under way.
    """
    return 1 if in_order else MESSAGE_BOUND


class Direction(StrEnum):
    """Outputs go forward, from producers to consumers; gradients of them go backward."""

    FORWARD = "forward"
    BACKWARD = "backward"
