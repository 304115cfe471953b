"""Events of ranks leave the heap by time, and at equal times by rank."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.schedule.compiled.progress import is_next, next_event, wake_at

EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30)


def heap(free_at=(0.0,) * 4) -> SimpleNamespace:
    return SimpleNamespace(
        free_at=np.array(free_at), event_times=np.empty(60), event_ranks=np.empty(60, np.int64),
        num_events=np.zeros(1, np.int64),
    )


@given(EVENTS, EVENTS)
def test_events_leave_by_time_and_then_by_rank(first, second) -> None:
    progress, expected = heap(), sorted(first)
    for time, rank in first:
        wake_at(progress, time, rank)
    for _ in range(len(first) // 2):
        assert is_next(progress, *expected[0])
        assert next_event(progress) == expected.pop(0)
    for time, rank in second:
        wake_at(progress, time, rank)
    for event in sorted([*expected, *second]):
        assert next_event(progress) == event
    assert progress.num_events[0] == 0


def test_a_busy_rank_is_not_woken_before_it_is_free() -> None:
    progress = heap((2.0, 0.0, 0.0, 0.0))
    for time in (1.0, 2.0, 3.0):
        wake_at(progress, time, 0)
    assert progress.num_events[0] == 2
    assert [next_event(progress) for _ in range(2)] == [(2.0, 0), (3.0, 0)]
