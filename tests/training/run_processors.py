"""Processors and factories that the tests' configurations name, as a user's module would."""

import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from raymm.data.processors import read_image


def image(path: str) -> dict[str, torch.Tensor]:
    """(3, 8, 8) float32 pixels."""
    pixels = np.asarray(read_image(path).resize((8, 8)), dtype=np.float32)
    return {"pixel_values": torch.from_numpy(pixels).permute(2, 0, 1) / 255}


def slow_image(path: str) -> dict[str, torch.Tensor]:
    """``image`` that takes its time, so that a test can interfere in the middle of a run."""
    time.sleep(0.25)
    return image(path)


def small_cnn(width: int = 8) -> nn.Module:
    """A plain encoder, for factory sources."""
    return nn.Sequential(nn.Conv2d(3, width, 4, 4), nn.Flatten(2))


NOT_A_FUNCTION = Path("nothing")
