"""Options of planning: their ranges, and names in errors."""

import math

import pytest

from raymm.config.planning_options import STYLES, PlanningOptions, PlanOptions, named_schedule
from raymm.errors import ConfigError, PlanError
from raymm.files.section import section_of


def test_other_styles_are_refused_with_the_accepted_ones():
    for style in STYLES:
        assert PlanOptions(style=style).style == style
    with pytest.raises(PlanError, match="style is 'both'; accepted: pipelined, multiplexed, auto"):
        PlanOptions(style="both")


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_time_limits_are_positive_and_finite(seconds):
    assert PlanOptions(time_limit=0.5).time_limit == 0.5
    with pytest.raises(PlanError, match="time_limit is .*; accepted: seconds above 0, at most"):
        PlanOptions(time_limit=seconds)


@pytest.mark.parametrize("field", ["ranks", "ranks_per_node"])
@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_counts_of_ranks_are_whole_and_positive(field, number):
    with pytest.raises(PlanError, match=f"^{field} "):
        PlanOptions(**{field: number})


def test_the_section_of_a_configuration_has_the_same_defaults():
    section, options = section_of(PlanningOptions)(), PlanningOptions()
    assert section.model_dump() == {**vars(options)}


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
