"""Schedules of modules that differ from that of the whole model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.config.sections import OptimizerSection

SCHEDULES = ("constant", "linear", "cosine")


@given(st.integers(1, 12), st.integers(0, 9), st.integers(1, 9))
def test_a_module_may_have_a_longer_warm_up(steps, general, of_module):
    """Check that a module's schedule may end within its warm-up, as a run's may."""
    section = OptimizerSection(
        schedule="cosine", warmup_steps=general, modules={"vision": {"warmup_steps": of_module}}
    )
    rule = section.build(steps).rule("vision")
    assert rule.factor(0) == 0 and rule.factor(of_module) == 1
    assert rule.total_steps == max(steps, general, of_module)
    assert section.build(steps).total_steps == max(steps, general)


def test_a_warm_up_beyond_the_given_end_is_refused():
    with pytest.raises(ValueError, match=r"modules.vision.total_steps is 5 and warmup_steps 9"):
        OptimizerSection(
            schedule="cosine", total_steps=5, modules={"vision": {"warmup_steps": 9}}
        )


@given(st.integers(1, 3), st.integers(0, 3), st.integers(0, 3), st.sampled_from(SCHEDULES))
def test_a_run_without_a_rate_is_noted(steps, general, of_vision, schedule):
    """Note that the rate is 0 in the first step of a warm-up: one step would train nothing."""
    section = OptimizerSection(
        schedule=schedule, warmup_steps=general, modules={"vision": {"warmup_steps": of_vision}}
    )
    notes = list(section.build(steps).notes(steps, ["vision", "llm"]))
    warmups = {"vision": of_vision, "llm": general}
    assert len(notes) == (len({w for w in warmups.values() if w}) if steps == 1 else 0)
    for note in notes:
        (warmup,) = {w for w in warmups.values() if f"warmup_steps is {w}:" in note}
        idle = ", ".join(name for name, w in warmups.items() if w == warmup)
        assert "run.steps is 1 and " in note and f"does not train {idle}. Set" in note
