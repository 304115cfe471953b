"""Schedules of modules that differ from that of the whole model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.config.optimizer_section import OptimizerSection


@given(st.integers(1, 12), st.integers(0, 9), st.integers(1, 9))
def test_a_module_may_have_a_longer_warm_up(steps, general, of_module):
    """The schedule of a run that ends within a warm-up ends with it, in modules, too."""
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
