"""Stage hooks of tests, named in configurations."""

import torch

from raymm import StageHook


class Noise(StageHook):
    """Add noise to the features in training."""

    def output(self, features, call):
        return features + 0.1 * torch.randn_like(features) if call.training else features


class Scaled(StageHook):
    def __init__(self, scale):
        self.scale = scale

    def output(self, features, call):
        return self.scale * features
