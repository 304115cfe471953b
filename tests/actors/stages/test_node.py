"""Stages of a graph's modules equal the graph in one process."""

import pytest
import torch
from torch import nn

from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.stages.node import NodeStage
from raymm.errors import ModelError
from raymm.model.dag_module import DagLoss, DagModule
from raymm.model.module_dag import ModuleDag

CONTEXT = MicrobatchContext(1)


class Pair(nn.Module):
    """Module with a floating-point and an integer output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        wide = self.linear(x)
        return {"wide": wide, "best": wide.argmax(-1)}


class Difference(nn.Module):
    """Loss of each sample."""

    def forward(self, wide: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        return wide.square().sum(-1) - wide.gather(-1, best[:, None])[:, 0]


def dag() -> ModuleDag:
    torch.manual_seed(0)
    return ModuleDag({
        "pair": DagModule(Pair(), reads={"x": "x"}, outputs=("wide", "best")),
        "error": DagLoss(Difference(), inputs={"wide": "pair.wide", "best": "pair.best"}),
    })


def stage(described: ModuleDag, name: str) -> NodeStage:
    spec = described.spec(name)
    built = NodeStage.build(spec, 0, spec.num_blocks + 1)
    assert isinstance(built, NodeStage)
    return built


def test_stages_give_the_loss_of_the_graph() -> None:
    """Outputs with a gradient are tensors of the message, the others are side tensors."""
    described = dag()
    first, last = stage(described, "pair"), stage(described, "error")
    x = torch.randn(5, 3)
    message = first.run({"x": x}, {}, CONTEXT)
    assert message.names == ("wide",) and message.tensors[0].shape == (5, 4)
    result = last.run(None, {"pair": message}, CONTEXT)
    expected = described({"x": x})
    assert result.loss is not None and not result.tensors
    torch.testing.assert_close(result.loss / 5, expected.losses["error"])
    result.loss.backward()
    assert all(parameter.grad is not None for parameter in first.parameters())


def test_optional_outputs_and_draws_follow_the_description() -> None:
    described = dag()
    assert stage(described, "pair").optional and not stage(described, "error").optional
    assert not stage(described, "pair").hands_on_features


def test_outputs_without_a_row_per_sample_are_refused() -> None:
    described = dag()
    stages = stage(described, "error")
    wrong = Message((torch.randn(5, 4),), {}, ("wide",))
    with pytest.raises(ModelError, match="best"):
        stages.run(None, {"pair": wrong}, CONTEXT)
