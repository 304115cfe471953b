"""Tensors that layers of several stages read (ports) equal one process, on Ray actors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raymm.model.dag_module import DagLoss, DagModule
from raymm.model.module_dag import ModuleDag
from raymm.runtime.specs import ParallelSpec, dag_plan
from tests.parity.test_pipelined_graphs import check, steps_of

WIDTH = 8

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Layer(nn.Linear):
    """Linear layer from (..., WIDTH) to the same shape."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x).tanh()


class Vision(nn.Module):
    """Tower that returns features of all its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        features = {}
        for number, layer in enumerate(self.layers):
            pixels = features[f"deep{number}"] = layer(pixels)
        return {**features, "last": pixels.square()}


class DeepStack(nn.Module):
    """Model whose first three layers read features of three layers; the last is a norm."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.into = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(
        self, x: torch.Tensor, deep0: torch.Tensor, deep1: torch.Tensor, deep2: torch.Tensor,
        last: torch.Tensor,
    ) -> torch.Tensor:
        """Read features of one layer each in layers 0, 1 and 2, and the last ones in 1 and 3."""
        hidden = self.embed(x)
        deep = deep0, deep1, deep2
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if number < 3:
                hidden = hidden + self.into[number](deep[number])
            if number % 2:
                hidden = hidden * last
        return self.norm(hidden)


class Distance(nn.Module):
    """Distance to the target."""

    def forward(self, states: torch.Tensor, due: torch.Tensor) -> torch.Tensor:
        return (states - due).square().mean(1)


def deep_batch(size, seed):
    torch.manual_seed(5000 + seed)
    return {
        "pixels": torch.randn(size, WIDTH), "x": torch.randn(size, 5),
        "due": torch.randn(size, WIDTH),
    }


def deep_stack(frozen: bool = False) -> ModuleDag:
    torch.manual_seed(0)
    example = {"x": torch.randn(2, 5)}
    example |= {name: torch.randn(2, WIDTH) for name in ("deep0", "deep1", "deep2", "last")}
    inputs = {name: f"vision.{name}" for name in ("deep0", "deep1", "deep2", "last")}
    return ModuleDag({
        "vision": DagModule(Vision(), reads="pixels", frozen=frozen),
        "llm": DagModule(DeepStack(), reads="x", inputs=inputs, example_inputs=example),
        "distance": DagLoss(Distance(), reads="due", inputs={"states": "llm"}),
    })


def test_a_probe_finds_the_layers_that_read_ports():
    ports = deep_stack().graph_with_ports(["llm"]).ports
    assert {port.name: port.layers for port in ports} == {
        "deep1": (1,), "deep2": (2,), "last": (1, 3)
    }
    assert deep_stack(frozen=True).graph_with_ports(["llm"]).ports == ()


@pytest.mark.cells(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_features_of_three_layers_go_into_three_stages(schedule):
    dag = deep_stack()
    plan = dag_plan(
        dag, {"llm": ParallelSpec(pp=3, layers=(1, 1, 2))}, 3, schedule,
        recompute=schedule == "1f1b",
    )
    check(dag, plan, steps_of(deep_batch, 3))


def test_with_replicas_and_stages_that_share_a_rank():
    dag = deep_stack()
    specs = {
        "vision": ParallelSpec(dp=2), "llm": ParallelSpec(pp=2, chunks=2, dp=2),
        "distance": ParallelSpec(ranks=(0,)),
    }
    check(dag, dag_plan(dag, specs, 4), steps_of(deep_batch, 4))
