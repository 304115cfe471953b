"""Schedules by name or import path."""

import pytest

from raymm.config.named_schedule import named_schedule
from raymm.errors import ConfigError, PlanError


def test_a_plain_name_is_returned_unchanged():
    assert named_schedule("schedules", "1f1b") == "1f1b"


@pytest.mark.parametrize("name", ["no_such_module:Schedule", "math:no_such_object"])
def test_a_missing_object_is_named_with_the_field(name):
    with pytest.raises(ConfigError, match=f"^parallel.schedule: .*{name.split(':')[0]}"):
        named_schedule("parallel.schedule", name)


def test_an_object_that_is_no_schedule_is_refused():
    says = "^schedules is 'math:floor': .*; accepted: a subclass of raymm.Schedule"
    with pytest.raises(PlanError, match=says):
        named_schedule("schedules", "math:floor")
