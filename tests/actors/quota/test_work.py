"""Works and the tensors that they read."""

from dataclasses import dataclass

import pytest
import torch

from raymm.actors.quota.work import Work, tensors_in


@dataclass
class Pair:
    first: object
    second: object


def test_tensors_are_found_in_nested_values():
    a, b, c, d = (torch.tensor(n) for n in range(4))
    value = [a, {"x": (b, "text"), "y": Pair(c, None)}, 3, Pair, {d}]
    assert [int(tensor) for tensor in tensors_in(value)] == [0, 1, 2, 3]
    assert list(tensors_in("text")) == []


def test_a_seed_without_draws_is_refused():
    assert Work(print, seed=3).draws
    with pytest.raises(ValueError, match="seed is 3, but draws is False; accepted: None"):
        Work(print, draws=False, seed=3)
