"""Buffers of a module in several stages are in the stage of their parameters."""

from dataclasses import replace

import torch
from torch import nn

from raymm.actors.modules.cut import own_buffers
from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.probe.cut import probe_encoder
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.weights.source import LiveSource


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)

    def forward(self, hidden):
        return hidden + self.norm(self.conv(hidden))


class Norms(nn.Module):
    """Batch norms before, in and after the blocks; a buffer of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 6, 4, stride=4), nn.BatchNorm2d(6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.head_norm = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, pixel_values):
        hidden = self.stem_norm(self.stem(pixel_values * self.scale))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head_norm(self.head(hidden))


def test_statistics_are_of_the_stage_that_saw_the_data():
    torch.manual_seed(0)
    images = {"pixel_values": torch.randn(4, 3, 16, 16)}
    source = LiveSource.of(Norms())
    spec = EncoderSpec("vision", source, num_blocks=3)
    context = MicrobatchContext(1, 0, ())
    whole = EncoderStage.build(spec, 0, 3)
    expected = whole.run(images, {}, context).tensors[0]
    assert own_buffers(whole) == {name for name, _ in whole.named_buffers()}
    cut = replace(spec, cut=probe_encoder(source, images))
    first, second = (EncoderStage.build(cut, lo, hi) for lo, hi in ((0, 2), (2, 3)))
    message = first.run(images, {}, context)
    assert torch.equal(second.run(None, {"vision.0": message}, context).tensors[0], expected)
    due = dict(whole.named_buffers())
    found = {}
    for stage in (first, second):
        own = own_buffers(stage)
        found |= {name: buffer for name, buffer in stage.named_buffers() if name in own}
    assert found.keys() == due.keys()
    for name, buffer in due.items():
        assert torch.equal(found[name], buffer), name
    for name in ("stem_norm.running_mean", "head_norm.running_mean"):
        assert sum(f"module.{name}" in own_buffers(stage) for stage in (first, second)) == 1
