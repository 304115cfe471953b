"""Inputs that are sent to later stages of a module."""

import pytest
import torch

from raymm.actors.modules.message import Message
from raymm.actors.stages.stage_inputs import (
    Reads,
    from_side,
    from_stages,
    ghosts,
    joined,
    kept_entries,
    message_of,
    message_of_entries,
    shown_inputs,
    shown_output,
    to_side,
)
from raymm.errors import ProbeError

CPU = torch.device("cpu")


def test_inputs_arrive_and_other_floats_arrive_as_zeros():
    inputs = {
        "ids": torch.tensor([[1, 2]]), "pixels": torch.randn(2, 3, dtype=torch.float64),
        "scale": torch.randn(2), "size": [3, None, "a"], "none": None,
    }
    side = to_side(inputs, {"scale"}, "vision")
    assert ghosts(side) == {"pixels"}
    received = from_side(side, CPU)
    assert received.pop("size") == inputs.pop("size")
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    torch.testing.assert_close(received, {**inputs, "pixels": zeros}, rtol=0, atol=0)


def test_what_cannot_be_sent_is_named():
    with pytest.raises(ProbeError, match="input 'size' of 'vision' is a set, which cannot be sent"):
        to_side({"size": {1}}, (), "vision")


def test_hidden_state_and_ports_are_read_from_all_producers():
    hidden, deep, wide = torch.randn(2), torch.randn(3), torch.randn(4)
    previous = message_of(hidden, {"deep": deep}, {"shape/float32/wide": torch.tensor([4])})
    received = {
        "llm": previous, "llm.0": Message((wide,), {}, ("wide",)),
        "vision": Message((torch.zeros(1),), {}),
    }
    state, side, ports = from_stages(received, "llm")
    assert state is hidden and side == {} and ports == {"deep": deep, "wide": wide}
    assert message_of(hidden, {}, {}).names == ()


def test_stored_features_of_items_are_those_of_the_items():
    def item(value):
        hidden = torch.full((1, 2), float(value))
        inputs = {"grid": torch.tensor([[value]]), "pixels": torch.zeros(1, 5), "merge": 2}
        return message_of(hidden, {}, to_side(inputs, (), "vision"))

    together = joined([item(1), item(2)])
    entries = kept_entries(together)
    assert all(len(entry) == 2 for entry in entries.values())
    second = message_of_entries({name: entry[1:] for name, entry in entries.items()})
    torch.testing.assert_close(second.tensors, item(2).tensors)
    torch.testing.assert_close(second.side, item(2).side)


def test_values_that_only_earlier_stages_have_are_refused():
    def callback(inputs):
        assert inputs["pixels"].shape == (2, 3)
        try:
            return float(inputs["pixels"].sum())
        except ProbeError:
            return 0.0  # swallowed, and raised at the end

    reads = Reads("postprocess callback", "vision")
    inputs = shown_inputs({"pixels": torch.ones(2, 3), "ids": torch.ones(1)}, {"pixels"}, reads)
    assert float(inputs["ids"]) == 1
    with pytest.raises(ProbeError, match=r"of 'vision' reads inputs\['pixels'\]"), reads.observed():
        callback(inputs)


def test_lost_outputs_are_refused():
    reads = Reads("postprocess callback", "vision")
    output = shown_output({"last": torch.ones(1), "all": [torch.ones(1)]}, {"all"}, reads)
    assert float(output["last"]) == 1
    with pytest.raises(ProbeError, match="reads output.all"):
        len(output["all"])
