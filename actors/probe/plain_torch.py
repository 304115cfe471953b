"""Trials of models, whatever the program around them has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain_torch() -> Iterator[None]:
    """On the CPU and with gradients, without autocast: for functions that try a model, or make
    tensors to send, in a user's program. That may have another default device, or have switched
    gradients off; a trial that looks for gradients would then find none, and pass."""
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
        with torch.autocast("cpu", enabled=False):
            yield
