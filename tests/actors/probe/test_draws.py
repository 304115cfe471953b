"""Forced random decisions."""

import random

import numpy as np
import torch

from raymm.actors.probe.draws import extreme_draws


def test_both_ends_of_every_interval_are_drawn():
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    with extreme_draws():
        drawn = {
            "torch": set(torch.rand(100).tolist()),
            "numpy": set(np.random.uniform(2, 5, 100).tolist()),
            "rand": set(np.random.rand(10, 10).flatten().tolist()),
            "python": {random.random() for _ in range(100)},
            "uniform": {random.uniform(2, 5) for _ in range(100)},
        }
    assert {name: sorted(ends) for name, ends in drawn.items()} == {
        "torch": [0, 1], "numpy": [2, 5], "rand": [0, 1], "python": [0, 1], "uniform": [2, 5],
    }
    assert 0 < random.random() < 1 and 0 < np.random.rand() < 1 and 0 < float(torch.rand(())) < 1
