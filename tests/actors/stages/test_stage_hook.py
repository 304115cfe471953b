"""Changes of a module's inputs and outputs by a user's hooks."""

import pytest
import torch

from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.stages.stage_hook import StageHook, StageHooks, overrides
from raymm.errors import ModelError

CONTEXT = MicrobatchContext(1, microbatch=3, sample_ids=("a", "b"), training=False)


class Scaled(StageHook):
    def __init__(self, factor):
        self.factor, self.calls = factor, []

    def inputs(self, inputs, call):
        self.calls.append(call)
        return {**inputs, "x": inputs["x"] * self.factor}


class Shifted(StageHook):
    def __init__(self, shift):
        self.shift = shift

    def output(self, features, call):
        return features + self.shift


class Wrong(StageHook):
    def __init__(self, returned):
        self.returned = returned

    def inputs(self, inputs, call):
        return self.returned

    def output(self, features, call):
        return self.returned


def test_hooks_change_inputs_and_outputs_in_order():
    first, second = Scaled(2), Scaled(5)
    hooks = StageHooks("vision", (first, Shifted(1), second, Shifted(-3)))
    inputs = {"x": torch.ones(2), "sample_index": torch.arange(2), "n": 4}
    changed = hooks.changed_inputs(inputs, CONTEXT)
    assert changed["x"].tolist() == [10, 10] and changed["n"] == 4
    assert torch.equal(changed["sample_index"], inputs["sample_index"])
    (call,) = first.calls
    assert (call.module, call.microbatch, tuple(call.sample_ids), call.training) == (
        "vision", 3, ("a", "b"), False
    )
    message = hooks.changed_outputs(Message((torch.ones(2, 3),), {}), CONTEXT)
    assert torch.equal(message.tensors[0], torch.full((2, 3), -1.0))
    assert overrides(first, "inputs") and not overrides(first, "output")


def test_only_the_first_and_the_last_stage_run_hooks():
    hooks = StageHooks("vision", (Scaled(2), Shifted(1)), first=False, last=False)
    inputs, message = {"x": torch.ones(2)}, Message((torch.ones(2),), {})
    assert hooks.changed_inputs(inputs, CONTEXT) is inputs
    assert hooks.changed_outputs(message, CONTEXT) is message


@pytest.mark.parametrize(("returned", "message"), [
    ({}, r"Wrong.inputs returned \[\]; accepted: a dict with \['x'\]"),
    (None, "Wrong.inputs returned NoneType"),
    ({"x": torch.ones(3)}, r"inputs returned x a .* shape \(3,\) .*accepted: .* shape \(2,\)"),
])
def test_wrong_inputs_are_named(returned, message):
    with pytest.raises(ModelError, match=message):
        StageHooks("vision", (Wrong(returned),)).changed_inputs({"x": torch.ones(2)}, CONTEXT)


def test_features_keep_their_gradient():
    features = torch.ones(2, requires_grad=True)
    with pytest.raises(ModelError, match="Wrong.output returned without a gradient"):
        StageHooks("vision", (Wrong(torch.ones(2)),)).changed_outputs(
            Message((features,), {}), CONTEXT
        )
