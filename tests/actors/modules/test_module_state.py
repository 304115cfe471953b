"""State of a stage that a run must not change."""

import pytest
import torch
from torch import nn

from raymm.actors.modules.message import Message
from raymm.actors.modules.module_state import (
    evaluating,
    inputs_unchanged,
    may_draw,
    statistics_kept,
)
from raymm.scheduler.plan.stage import StageId


def test_modes_are_restored_one_by_one():
    frozen, trained = nn.Linear(1, 1).eval(), nn.Linear(1, 1)
    stage = nn.Sequential(frozen, trained)
    with pytest.raises(KeyError), evaluating([stage]):
        assert not any(module.training for module in stage.modules())
        raise KeyError
    assert [stage.training, frozen.training, trained.training] == [True, False, True]


def test_statistics_are_those_before_a_forward():
    stage = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    before = {name: value.clone() for name, value in stage.state_dict().items()}
    with statistics_kept(stage):
        output = stage(torch.randn(5, 2)).sum()
        assert not torch.equal(stage[0].running_mean, before["0.running_mean"])
    output.backward()  # autograd's saved tensors are intact
    torch.testing.assert_close(dict(stage.state_dict()), before, rtol=0, atol=0)


def test_layers_that_may_draw_random_numbers():
    plain = nn.Sequential(nn.Linear(1, 1), nn.GELU())
    dropping = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1))
    assert not may_draw(plain) and may_draw(dropping)
    assert not may_draw(dropping.eval())
    assert not may_draw(dropping.train(), {nn.Dropout})


@pytest.mark.parametrize("where", ["message", "side", "inputs"])
def test_inputs_changed_in_place_are_an_error(where):
    tensors = {name: torch.zeros(2) for name in ("message", "side", "inputs")}
    message = Message((tensors["message"],), {"mask": tensors["side"]})
    with pytest.raises(RuntimeError, match="llm.* changes its inputs in place"):
        with inputs_unchanged(StageId("llm", 0), [message], {"x": tensors["inputs"], "n": 3}):
            tensors[where].add_(1)
    with inputs_unchanged(StageId("llm", 0), [message], None):
        tensors["message"].add(1)
