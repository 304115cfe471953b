"""Steps of a microbatch in a stage, and the forward of its part of a module."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, SiglipVisionConfig

import raymm
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.probe.callbacks import Cuts, probe_chain
from raymm.actors.stages.encoder import EncoderStage
from raymm.actors.stages.stage import Call, PartForward, Stage
from raymm.errors import ForwardLeft

CONTEXT = MicrobatchContext(1)


class Doubled(Stage):
    """Stage that doubles its input, or leaves before the end."""

    def __init__(self, leaves: bool) -> None:
        super().__init__()
        self._leaves = leaves

    def receive(self, inputs, received, context) -> Call:
        return Call(None, inputs, {"given": torch.tensor(len(received))})

    def forward(self, call: Call, context) -> Any:
        if self._leaves:
            raise ForwardLeft(call.inputs["x"])
        return call.inputs["x"] * 2

    def pass_on(self, left: ForwardLeft, call: Call) -> Message:
        return Message((left.value,), call.side, ("left",))

    def outputs(self, output, call, context) -> Message:
        return Message((output,), call.side, ("done",))


@pytest.mark.parametrize(("leaves", "name", "factor"), [(True, "left", 1), (False, "done", 2)])
def test_a_stage_passes_on_what_its_part_computes(leaves, name, factor) -> None:
    x = torch.randn(3)
    message = Doubled(leaves).run({"x": x}, {"a": Message((), {})}, CONTEXT)
    assert message.names == (name,) and message.side["given"] == 1
    assert torch.equal(message.tensors[0], factor * x)


def spec():
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2)
    vision = raymm.ModalityModule(
        SiglipVisionConfig(image_size=8, patch_size=4, **sizes), hidden_size=16
    )
    model = raymm.MultimodalModule({"vision": vision}, LlamaConfig(vocab_size=32, **sizes))
    return probe_chain(model.encoder_spec("vision"), Cuts(True, False))


def test_parts_of_a_module_give_its_output() -> None:
    """The first part leaves the forward with the hidden state that the second one continues."""
    described = spec()
    first, last = EncoderStage.build(described, 0, 1), EncoderStage.build(described, 1, 4)
    whole = EncoderStage.build(described, 0, 4)
    pixels = torch.randn(2, 3, 8, 8)
    part = PartForward("vision", first.module, described.cut, 0, 1)
    assert part.blocks == "encoder.layers"
    with pytest.raises(ForwardLeft) as left:
        part(None, CONTEXT, pixel_values=pixels)
    message = first.run({"pixel_values": pixels}, {}, CONTEXT)
    assert torch.equal(left.value.value, message.tensors[0])
    output = last.run(None, {"vision": message}, CONTEXT)
    expected = whole.run({"pixel_values": pixels}, {}, CONTEXT)
    torch.testing.assert_close(output.tensors[0], expected.tensors[0])


def test_a_complete_module_runs_without_a_cut() -> None:
    module = torch.nn.Linear(3, 2)
    part = PartForward("vision", module, None, 0, 1)
    x = torch.randn(4, 3)
    assert torch.equal(part(None, CONTEXT, input=x), module(x))
    part.detach()
