"""Default torch settings for trials in user programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain_torch() -> Iterator[None]:
    """Context manager for trials: on the CPU, with gradients and without autocast.

    Without gradients, as set by a user's program, a trial that looks for them would pass.
    """
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
        with torch.autocast("cpu", enabled=False):
            yield
