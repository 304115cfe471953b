"""Memory of a process in addition to weights and activations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.costs.device_memory import message_bytes

COUNTS = st.integers(0, 100)


@given(
    st.sampled_from(["cpu", "unknown", "H100"]), st.integers(1, 9), COUNTS, COUNTS, COUNTS, COUNTS
)
def test_messages_held_during_compute(
    device: str, microbatches: int, received: int, output: int, kept: int, awaited: int
) -> None:
    """Count receives of both directions, which are posted up to a limit, and unreceived messages.
    """
    total = 0
    for number in range(1 if device == "H100" else 4):
        if number < microbatches:
            total += received + awaited
    for _ in range(4):
        total += output + kept
    assert message_bytes(device, microbatches, received, output, kept, awaited) == total
