"""Schedules of modules and of runs whose number of steps changes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from raymm.config.optimizer_section import OptimizerSection


@given(st.integers(1, 12), st.integers(0, 9), st.integers(1, 9))
def test_a_module_may_have_a_longer_warm_up(steps, general, of_module):
    """The schedule of a run that ends within a warm-up ends with it, in modules, too."""
    section = OptimizerSection(
        schedule="cosine", warmup_steps=general, modules={"vision": {"warmup_steps": of_module}}
    )
    rule = section.build(steps).rule("vision")
    assert rule.factor(0) == 1 / of_module and rule.factor(of_module - 1) == 1
    assert rule.total_steps == max(steps, general, of_module)
    assert section.build(steps).total_steps == max(steps, general)


def test_a_warm_up_beyond_the_given_end_is_refused():
    with pytest.raises(ValueError, match=r"modules.vision.total_steps is 5 and warmup_steps 9"):
        OptimizerSection(
            schedule="cosine", total_steps=5, modules={"vision": {"warmup_steps": 9}}
        )


def torch_rates(steps: int, warmup: int, lr: float, least: float) -> list[float]:
    """Return the rates of torch's own schedules, one after the other."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=lr)
    decay = CosineAnnealingLR(optimizer, max(steps - warmup, 1), least * lr)
    schedule = decay
    if warmup:
        rising = LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
        schedule = SequentialLR(optimizer, [rising, decay], [warmup])
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(("warmup", "least"), [(0, 0.0), (3, 0.0), (4, 0.1)])
def test_a_longer_run_resumes_with_the_rates_of_its_own_schedule(warmup, least):
    """Steps after a resume have the rates of a run that had as many steps from the beginning."""
    section = OptimizerSection(
        lr=0.5, schedule="cosine", warmup_steps=warmup, min_lr_ratio=least
    )
    for steps in (8, 13):
        due = torch_rates(steps, warmup, 0.5, least)
        rates = [section.build(steps).rate(step) for step in range(steps)]
        assert rates == pytest.approx(due)
