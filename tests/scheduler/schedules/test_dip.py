"""DIP searches for the order with the durations of the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raymm.errors import NoPlanError
from raymm.scheduler.schedule.lower import full_program
from tests.support.field_schedules import RANKS, replicated_plan, stepped


def test_dip_order_depends_on_durations() -> None:
    plans = [replicated_plan(8, "dip", seconds) for seconds in (0.5, 8.0)]
    first, second = map(full_program, plans)
    assert first != second


def test_dip_refuses_limits_that_no_combination_fits() -> None:
    plan = replace(replicated_plan(8, "dip"), activation_limits=(0,) * RANKS)
    with pytest.raises(NoPlanError, match=r"activation limits \(0, 0, 0, 0\) leave"):
        stepped(plan).seconds()
