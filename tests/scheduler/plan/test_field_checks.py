"""Checks of plan fields: the bounds, and the type of a number."""

from __future__ import annotations

import numpy as np
import pytest

from raymm.errors import PlanError
from raymm.scheduler.plan.field_checks import check_choices, check_number


@pytest.mark.parametrize("value", [0, 8, 2.0, True, "2", None, np.int64(2)])
def test_only_whole_numbers_in_bounds_are_accepted(value) -> None:
    with pytest.raises(PlanError, match="^tp is .*; it must be "):
        check_number("tp", value, most=7)
    for accepted in (1, 7):
        check_number("tp", accepted, most=7)


def test_numbers_out_of_bounds_name_the_bound() -> None:
    with pytest.raises(PlanError, match="rank is -1; it must be a whole number, at least 0"):
        check_number("rank", -1, least=0)
    with pytest.raises(PlanError, match=r"rank is 1000000000000000000000000000\d*; .*at most 5"):
        check_number("rank", 10**400, most=5)


def test_choices_are_a_non_empty_part_of_the_accepted() -> None:
    check_choices("schedules", ["b", "a"], ["a", "b", "c"])
    with pytest.raises(PlanError, match="schedules has 'd'; accepted: a, b, c"):
        check_choices("schedules", ["a", "d"], ["a", "b", "c"])
    with pytest.raises(PlanError, match="schedules is empty; accepted: a, b"):
        check_choices("schedules", [], ["a", "b"])
