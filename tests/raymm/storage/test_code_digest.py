"""Digests of functions change with their code and values, and with nothing else."""

import functools

import numpy as np
import pytest
import torch

from raymm.storage.code_digest import MOST_DEPTH, ValueDigest, code_digest


def digest(value, strict=False):
    (made := ValueDigest(strict)).feed(value)
    return made.hashed.hexdigest()


def scaled(factor):
    return lambda value: factor * value


def test_a_function_of_the_same_code_and_values_is_equal():
    assert code_digest(scaled(2)) == code_digest(scaled(2)) != code_digest(scaled(3))
    assert code_digest(functools.partial(scaled, 2)) != code_digest(functools.partial(scaled, 3))
    assert code_digest(lambda x: x + 1) != code_digest(lambda x: x + 2)
    assert code_digest(lambda x, y=1: x) != code_digest(lambda x, y=2: x)


@pytest.mark.parametrize(("one", "other"), [
    (1, 1.0), (1, True), ("1", 1), (b"a", "a"), ([1], (1,)), (None, "None"),
    ([[1], 2], [1, [2]]), ([[1], 2], [[1, 2]]), ({"a": 1}, {"a": 2}),
    ("\ud800", "\ud801"), (0.0, -0.0), ({1, 2}, {1, 3}),
    (torch.zeros(2), torch.zeros(2, dtype=torch.int32)), (torch.zeros(2, 3), torch.zeros(3, 2)),
    (np.array([1.0]), torch.tensor([1.0], dtype=torch.float64)),
])
def test_different_values_have_different_digests(one, other):
    assert digest(one) == digest(one) != digest(other)


def test_the_order_of_keys_and_elements_does_not_count():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"x", "y", "z"}) == digest({"z", "y", "x"})
    assert digest(torch.arange(6).view(2, 3).T) == digest(torch.arange(6).view(2, 3).T.contiguous())


def test_values_that_cannot_be_hashed_are_reported():
    made = ValueDigest(strict=True)
    made.feed(number for number in ())
    assert made.unseen == ["holds a builtins.generator, which cannot be pickled (TypeError)"]
    nested = []
    for _ in range(MOST_DEPTH + 1):
        nested = [nested]
    (made := ValueDigest()).feed(nested)
    assert made.unseen == [f"nests values more than {MOST_DEPTH} deep"]


def test_a_cycle_ends():
    cycle = []
    cycle.append(cycle)
    assert len(digest(cycle)) == 64
