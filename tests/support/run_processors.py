"""Processors and factories for the tests' configurations, like a user's module."""

import os
import socket
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from raymm.data.samples.processors import read_image


def image(path: str) -> dict[str, torch.Tensor]:
    """Return (3, 8, 8) float32 pixels."""
    pixels = np.asarray(read_image(path).resize((8, 8)), dtype=np.float32)
    return {"pixel_values": torch.from_numpy(pixels).permute(2, 0, 1) / 255}


def sound(path: str) -> dict[str, torch.Tensor]:
    """Return (576,) audio samples: an image's pixels, three times."""
    return {"input_values": image(path)["pixel_values"].flatten().repeat(3) - 0.5}


def slow_image(path: str) -> dict[str, torch.Tensor]:
    """Run ``image`` slowly, so that a test can interfere in the middle of a run."""
    time.sleep(0.25)
    return image(path)


def image_or_nan(path: str) -> dict[str, torch.Tensor]:
    """Run ``image``, with a NaN for the file ``train-5.png``."""
    found = image(path)
    if Path(path).name == "train-5.png":
        found["pixel_values"][1, 2, 3] = torch.nan
    return found


def natural_image(path: str) -> dict[str, torch.Tensor]:
    """Return (3, height, width) float32 pixels in the size of the file."""
    pixels = np.asarray(read_image(path), dtype=np.float32)
    return {"pixel_values": torch.from_numpy(pixels).permute(2, 0, 1) / 255}


_images = 0


def late_image(path: str) -> dict[str, torch.Tensor]:
    """Run ``image``, with a long delay after the first few."""
    global _images
    _images += 1
    time.sleep(20 if _images > 8 else 0)
    return image(path)


def small_cnn(width: int = 8) -> nn.Module:
    """Return a plain encoder, for factory sources."""
    return nn.Sequential(nn.Conv2d(3, width, 4, 4), nn.Flatten(2))


class CountingCnn(nn.Module):
    """Plain encoder whose batch norm counts its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.norm(self.patches(pixel_values)).flatten(2).transpose(1, 2)


NOT_A_FUNCTION = Path("nothing")


def one_slow_copy(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Delay an encoder for every item, and four times as long in one process of the cluster.

    The first caller is the slow one; it holds a socket's name from then on.
    """
    global _slow
    pixels = inputs["pixel_values"]
    if pixels.is_meta:  # the driver measures how many tokens an item has
        return inputs
    if _slow is None:
        _slow = socket.socket(socket.AF_UNIX)
        try:
            _slow.bind(f"\0raymm-slow-{os.environ['RAY_RAYLET_PID']}")  # one per cluster
        except OSError:
            _slow = False
    time.sleep((0.08 if _slow else 0.02) * len(pixels))
    return inputs


_slow: socket.socket | bool | None = None
