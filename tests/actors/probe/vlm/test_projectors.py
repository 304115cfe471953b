"""Inputs of a tower's submodules in its call for features."""

import torch
from torch import nn

from raymm.actors.probe.vlm.calls import Called
from raymm.actors.probe.vlm.projectors import Inflow, inflows
from raymm.actors.weights.model_part import Call


class Frozen(nn.Module):
    """Model that runs its encoder without gradients, even if it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.projector = nn.Linear(3, 4), nn.Linear(4, 2)

    def get_audio_features(self, input_values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.encoder(input_values)
        return self.projector(features)


def test_an_encoder_under_no_grad_reads_the_arguments():
    arguments = {"input_values": torch.ones(2, 3)}
    call = Call("", "get_audio_features")
    called = Called(call, "audio", arguments, None, {"encoder", "projector"})
    found = inflows(Frozen(), called, ["encoder", "projector"])
    assert found == {"encoder": Inflow(items=True), "projector": Inflow()}
