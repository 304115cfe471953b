"""Trials of custom optimizers: traits of those that are exact, and reasons for the others."""

import pytest
import torch

from raymm.actors.optimizer.custom_optimizer import optimizer_traits
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.errors import ConfigError
from tests.support import custom_optimizers


def traits(name):
    return optimizer_traits("optimizer.name", OptimizerConfig(name=name))


@pytest.mark.parametrize(("name", "expected"), [
    ("Lion", (True, 1.0, 0)), ("sgd", (True, 1.0, 0)), ("adagrad", (True, 1.0, 1)),
    ("rprop", (True, 2.0, 1)), ("Normalised", (False, 0.0, 0)),
])  # fmt: skip
def test_traits_of_exact_optimizers(name, expected):
    before = torch.get_rng_state()
    assert traits(f"tests.support.custom_optimizers:{name}") == expected
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("name", "reason"), [
    ("OfAll", "the update of a parameter depends on other parameters"),
    ("Counting", "a resumed run would differ"), ("Drawing", "a resumed run would differ"),
    ("WithNumber", "'count' of its state is a int, not a tensor"),
    ("nothing", "it returned NoneType"), ("regrouped", "does not pass the groups"),
    ("failing", "it raised KeyError: 'width'"), ("not_a_function", "a int"),
    ("absent", "has no attribute 'absent'"),
])  # fmt: skip
def test_others_are_rejected_with_the_reason(name, reason):
    with pytest.raises(ConfigError) as error:
        traits(f"tests.support.custom_optimizers:{name}")
    text = str(error.value)
    assert text.startswith(f"optimizer.name is 'tests.support.custom_optimizers:{name}'")
    assert reason in text
    assert "accepted: adamw, adamw_8bit, muon, or module:function" in text


def test_a_function_is_accepted_in_place_of_its_path():
    assert traits(custom_optimizers.sgd) == traits("tests.support.custom_optimizers:sgd")


@pytest.mark.parametrize(("values", "says"), [
    ({"eps": 1e-5},
     "eps is 1e-05, and name 'tests.support.custom_optimizers:sgd', whose function sets it"),
    ({"schedule": "a:b", "warmup_steps": 2}, "warmup_steps is 2, and schedule 'a:b', whose"),
    ({"schedule": "step"}, "schedule is 'step'; accepted: constant, linear, cosine, or module:f"),
])  # fmt: skip
def test_settings_that_would_have_no_effect_are_named(values, says):
    with pytest.raises(ValueError) as error:
        OptimizerConfig(name="tests.support.custom_optimizers:sgd", **values)
    assert says in str(error.value)


def test_a_custom_schedule_gives_the_rates():
    config = OptimizerConfig(lr=4.0, schedule="tests.support.custom_optimizers:half_after_three")
    assert [config.rate(step) for step in range(5)] == [4, 4, 4, 2, 2]


@pytest.mark.parametrize(("name", "says"), [
    ("negative", "for step 2 its value is -1"), ("zero", "it is 0 for all 5 steps"),
    ("absent", "has no attribute 'absent'"), ("failing", "for step 0 it raised KeyError"),
])  # fmt: skip
def test_a_wrong_schedule_is_named(name, says):
    config = OptimizerConfig(schedule=f"tests.support.custom_optimizers:{name}")
    with pytest.raises(ConfigError) as error:
        config.check_schedule("optimizer.modules.llm.schedule", 5)
    assert str(error.value).startswith(
        f"optimizer.modules.llm.schedule is 'tests.support.custom_optimizers:{name}'"
    )
    assert says in str(error.value) and "module:function" in str(error.value)
