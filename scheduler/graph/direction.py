"""Direction of data through a graph, and the limit on messages in flight."""

from enum import StrEnum

MESSAGE_BOUND = 4
"""Most messages of one edge that may be in flight, sent but not yet received, in programs that end
with this bound. It keeps a frozen encoder from running ahead by all microbatches of a step."""


def posted_receives(in_order: bool) -> int:
    """Return how many receive buffers of one edge a receiver holds while it computes, including the
    one that it is working on. If ``in_order``, as on a GPU, each receive is posted when its sender
    sends (:mod:`raymm.scheduler.program.issue_order`); else :data:`MESSAGE_BOUND` are posted at
    once."""
    return 1 if in_order else MESSAGE_BOUND


class Direction(StrEnum):
    """Direction of a message: outputs go forward to consumers, their gradients go backward."""

    FORWARD = "forward"
    BACKWARD = "backward"
