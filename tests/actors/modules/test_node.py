"""Calls of a graph's nodes."""

import pytest
import torch
from torch import nn

from raymm.actors.modules.node import Input, NodeSpec, call
from raymm.errors import ModelError
from raymm.scheduler.graph.sample_ranges import Range

OWN = Range(2, 4)


class Module(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, **arguments):
        return self.run(**arguments)


def called(spec, run, entries=None, inputs=None, every=None):
    return call(spec, Module(run), entries or {}, inputs or {}, every or {}, OWN)


def test_arguments_come_from_the_batch_and_other_nodes():
    spec = NodeSpec(
        "head", entries=(("x", "pixels"),),
        inputs=(Input("f", "vision"), Input("g", "vision", "b"), Input("all", "text", every=True)),
    )
    a, b, texts = torch.ones(2, 3), torch.full((2, 3), 2.0), torch.arange(6.0)[:, None]

    def run(x, f, g, all, own):
        assert f.keys() == {"a", "b"}
        return x + f["a"] + g + all[own]

    outputs = called(
        spec, run, {"pixels": torch.zeros(2, 3)}, {"vision": {"a": a, "b": b}},
        {"text": {"": texts}},
    )
    assert torch.equal(outputs[""], torch.tensor([[5.0], [6.0]]).expand(2, 3))


def test_outputs_are_named():
    spec = NodeSpec("head", outputs=("1",))
    assert list(called(spec, lambda: (torch.zeros(2), torch.ones(2)))) == ["1"]
    made = NodeSpec("head", postprocess=lambda arguments, output: {"y": output + 1, "none": None})
    assert called(made, lambda: torch.zeros(2))["y"].tolist() == [1, 1]
    loss = NodeSpec("loss", loss=True)
    assert called(loss, lambda: torch.zeros(2)).keys() == {""}


@pytest.mark.parametrize(("spec", "output", "message"), [
    (NodeSpec("head"), torch.zeros(3), r"shape \(3,\) for 2 samples"),
    (NodeSpec("head"), "text", "'head' returns str; accepted"),
    (NodeSpec("head"), {"x": 3}, "output 'x' of 'head' is int"),
    (NodeSpec("loss", loss=True), torch.zeros(2, 1), r"loss 'loss' returns .*\(2,\)"),
])
def test_a_wrong_output_is_named(spec, output, message):
    with pytest.raises(ModelError, match=message):
        called(spec, lambda: output)


def test_a_missing_output_and_a_changed_input_are_named():
    inputs = {"vision": {"a": torch.zeros(2)}}
    with pytest.raises(ModelError, match="'head' reads output 'b' of 'vision'; accepted: a"):
        called(NodeSpec("head", inputs=(Input("x", "vision", "b"),)), None, {}, inputs)
    with pytest.raises(ModelError, match="'head'.*'?x'?"):
        called(NodeSpec("head", inputs=(Input("x", "vision"),)), lambda x: x.add_(1), {}, inputs)
