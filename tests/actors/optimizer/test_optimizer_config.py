"""Learning rates of schedules equal those of ``transformers``."""

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from raymm.actors.optimizer.gradient_reduction import ParameterOwnership
from raymm.actors.optimizer.optimizer import RankOptimizer
from raymm.actors.optimizer.optimizer_config import OptimizerConfig, UpdateRule
from raymm.scheduler.plan.stage import StageId

LR = 3e-3
# raymm's schedule and minimum share of the rate; transformers' schedule and its options.
SCHEDULES = {
    "constant": ({"schedule": "constant"}, "constant_with_warmup", {}),
    "linear": ({"schedule": "linear"}, "linear", {}),
    "cosine": ({"schedule": "cosine"}, "cosine", {}),
    "cosine with a least rate": (
        {"schedule": "cosine", "min_lr_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1},
    ),
}
PAIRS = [(1, 0), (1, 1), (2, 1), (3, 3), (7, 0), (12, 2), (20, 19), (100, 3), (101, 33)]
KEY = (StageId("a", 0), "module.weight")


def hugging_face(name: str, steps: int, warmup: int):
    """Return AdamW over one parameter, and its scheduler."""
    _, schedule, options = SCHEDULES[name]
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=LR, weight_decay=0.1)
    scheduler = get_scheduler(
        schedule, optimizer, num_warmup_steps=warmup, num_training_steps=steps,
        scheduler_specific_kwargs=options,
    )
    return parameter, optimizer, scheduler


def rule(name: str, steps: int, warmup: int, kind: type[UpdateRule] = UpdateRule) -> UpdateRule:
    return kind(
        lr=LR, weight_decay=0.1, warmup_steps=warmup, total_steps=steps, **SCHEDULES[name][0]
    )


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(("steps", "warmup"), PAIRS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_equal_transformers_at_every_step(name, steps, warmup):
    _, _, scheduler = hugging_face(name, steps, warmup)
    mine = rule(name, steps, warmup)
    for step in range(steps):
        assert mine.rate(step) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12), step
        scheduler.step()


def rank_optimizer(config: OptimizerConfig) -> RankOptimizer:
    parameters = {KEY: nn.Parameter(torch.ones(3))}
    ownership = ParameterOwnership((), frozenset({KEY}), frozenset({KEY}))
    return RankOptimizer(0, parameters, config, ownership, {}, torch.device("cpu"))


def train(optimizer: RankOptimizer, steps: range) -> list[float | None]:
    """Take steps, and return their learning rates."""
    rates = []
    for step in steps:
        optimizer.parameters[KEY].grad = gradient(step)
        optimizer.clip()
        optimizer.step()
        rates.append(optimizer.finish().learning_rate)
    return rates


def gradient(step: int) -> torch.Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(step)) / 10


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_training_equals_hugging_face(name):
    steps, warmup = 5, 3
    parameter, optimizer, scheduler = hugging_face(name, steps, warmup)
    mine = rank_optimizer(rule(name, steps, warmup, OptimizerConfig))
    for step in range(steps):
        parameter.grad = gradient(step)
        optimizer.step()
        scheduler.step()
        train(mine, range(step, step + 1))
        torch.testing.assert_close(mine.parameters[KEY], parameter, rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("saved", [0, 1, 2, 4])
def test_a_resumed_run_follows_the_schedule_of_its_new_length(name, saved):
    first = rank_optimizer(rule(name, 5, 2, OptimizerConfig))
    train(first, range(saved))
    resumed = rank_optimizer(rule(name, 9, 2, OptimizerConfig))
    resumed.load_state_tensors(first.state_tensors(), saved)
    _, _, scheduler = hugging_face(name, 9, 2)
    for step in range(9):
        if step >= saved:
            (rate,) = train(resumed, range(step, step + 1))
            assert rate == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12), step
        scheduler.step()
