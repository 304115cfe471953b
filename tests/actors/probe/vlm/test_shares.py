"""Towers whose items attend to each other are never sharded by items."""

import pytest
import torch
from torch import nn

from raymm.actors.probe.vlm.shares import probe_items
from raymm.actors.stages.features import Form
from raymm.actors.stages.tower import TowerSpec
from raymm.actors.weights.source import LiveSource
from raymm.errors import ProbeError


class ByThemselves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, pixel_values):
        return self.linear(pixel_values)


class LessTheirMean(ByThemselves):
    def forward(self, pixel_values):
        features = self.linear(pixel_values)
        return features - features.mean(dim=0)


class AttendingToAll(ByThemselves):
    def forward(self, pixel_values):
        features = self.linear(pixel_values)
        return torch.softmax(features @ features.T, dim=-1) @ features


def spec_of(module: nn.Module, inputs: dict) -> TowerSpec:
    return TowerSpec("vision", LiveSource.of(module), 1, form=Form.of(module(**inputs)))


@pytest.mark.parametrize("kind", [ByThemselves, LessTheirMean, AttendingToAll])
def test_items_are_encoded_independently(kind):
    """Check also a single item, whose second copy would be all that another sees."""
    torch.manual_seed(0)
    for items in (1, 3):
        inputs = {"pixel_values": torch.randn(items, 6)}
        spec = spec_of(kind(), inputs)
        if kind is ByThemselves:
            probe_items(spec, inputs)
            continue
        with pytest.raises(ProbeError, match="single items give other features"):
            probe_items(spec, inputs)
