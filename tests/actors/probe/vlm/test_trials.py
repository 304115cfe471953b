"""Inputs of trials."""

from types import SimpleNamespace

import torch

from raymm.actors.probe.vlm.trials import twice, twice_along


def test_a_second_copy_differs_in_numbers_only():
    values = torch.tensor([[1.0, 0.0], [2.0, 3.0]])
    doubled = twice_along(values, 1)
    assert doubled.shape == (2, 4) and torch.equal(doubled[:, :2], values)
    assert doubled[0, 3] == 0 and (doubled[:, 2] != values[:, 0]).all()
    ids = torch.tensor([[1, 2]])
    assert twice_along(ids, 0).tolist() == [[1, 2], [1, 2]]
    assert twice_along("text", 0) == "text"


def test_rows_and_their_items_are_doubled():
    tower = SimpleNamespace(arguments=(("pixel_values", "pixels"),))
    inputs = {
        "input_ids": torch.zeros(2, 5, dtype=torch.long), "pixels": torch.ones(3, 4),
        "position_ids": torch.zeros(3, 2, 5, dtype=torch.long), "scale": torch.ones(7),
    }
    doubled = twice(inputs, (tower,))
    assert {name: tuple(value.shape) for name, value in doubled.items()} == {
        "input_ids": (4, 5), "pixels": (6, 4), "position_ids": (3, 4, 5), "scale": (7,),
    }
