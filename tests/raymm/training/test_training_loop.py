"""Seconds and speeds of steps, with a controlled clock."""

from __future__ import annotations

import pytest

from raymm.training.training_loop import StepClock

TOKENS = 100


class Times:
    """Clock that is set by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def read(clock, times, at, busiest=0.9):
    times.now = at
    return clock.read(TOKENS, busiest)


def test_steps_read_immediately_take_the_time_between():
    times = Times()
    clock = StepClock(times)
    assert [read(clock, times, at) for at in (1.0, 2.0, 3.5)] == [1.0, 1.0, 1.5]


def test_an_early_result_takes_its_ranks_compute_time():
    times = Times()
    clock = StepClock(times)
    assert read(clock, times, 2.0) == 2.0  # two steps were in flight, and both have ended
    assert read(clock, times, 2.01) == 0.9


def test_the_first_speed_is_without_the_first_step():
    times = Times()
    clock = StepClock(times)
    read(clock, times, 50.0)  # waits for data, loads kernels
    for at in (51.0, 52.0):
        read(clock, times, at)
    assert clock.speed() == pytest.approx(2 * TOKENS / 2)
    read(clock, times, 54.0)
    assert clock.speed() == pytest.approx(TOKENS / 2)


def test_the_first_speed_covers_several_steps():
    """Run two steps of a second; the second ends while the driver processes the first."""
    times = Times()
    clock = StepClock(times)
    read(clock, times, 2.0)
    read(clock, times, 2.08)
    assert clock.speed() == pytest.approx(TOKENS / 0.9)


def test_a_single_step_has_its_own_speed():
    times = Times()
    clock = StepClock(times)
    read(clock, times, 4.0)
    assert clock.speed() == pytest.approx(TOKENS / 4)


def test_pauses_are_not_part_of_a_speed():
    times = Times()
    clock = StepClock(times)
    read(clock, times, 1.0)
    read(clock, times, 2.0)
    times.now = 30.0  # a checkpoint
    clock.restart()
    assert read(clock, times, 31.0) == 1.0
    assert clock.speed() == pytest.approx(2 * TOKENS / 2)
