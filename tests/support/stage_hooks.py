"""Stage hooks of tests, named in configurations and imported by ranks."""

from dataclasses import dataclass

import torch

from raymm import StageHook


class Squashed(StageHook):
    """Change images and features by fixed functions."""

    def inputs(self, inputs, call):
        return {**inputs, "pixel_values": inputs["pixel_values"] * 1.5}

    def output(self, features, call):
        return 2 * features.tanh()


@dataclass
class Noise(StageHook):
    """Add noise to images and features, in training."""

    scale: float = 0.1

    def inputs(self, inputs, call):
        return {name: self.noisy(value, call) for name, value in inputs.items()}

    def output(self, features, call):
        return self.noisy(features, call)

    def noisy(self, values, call):
        return values + self.scale * torch.randn_like(values) if call.training else values


class Doubled(StageHook):
    def output(self, features, call):
        return 2 * features
