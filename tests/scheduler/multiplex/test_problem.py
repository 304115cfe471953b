"""Mapping problems: their tables and relations, and fields that are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.shared.mapping_instances import random_problem
from raymm.errors import PlanError


def test_wrong_fields_are_refused() -> None:
    problem = random_problem(0, "parallel", 2, 2)
    with pytest.raises(PlanError, match="memory_over is 'day'; accepted: iteration, stage"):
        replace(problem, memory_over="day")
    with pytest.raises(PlanError, match="allowed has 1 entries; there are 2 modules"):
        replace(problem, allowed=((1,),))
