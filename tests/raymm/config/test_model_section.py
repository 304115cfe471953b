"""Example inputs of an encoder: their dtype, shape and values."""

import pytest
import torch
from pydantic import ValidationError

from raymm.config.model_section import ExampleSection, example_tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_a_shape_gives_the_same_tensor_every_time(dtype):
    section = ExampleSection.model_validate({"shape": [2, 3], "dtype": dtype})
    tensor = section.tensor()
    assert tensor.shape == (2, 3) and tensor.dtype == getattr(torch, dtype)
    assert torch.equal(tensor, section.tensor())
    assert tensor.is_floating_point() or bool((tensor == 1).all())


def test_values_are_kept():
    assert ExampleSection(values=[[1, 2], [3, 4]], dtype="int16").tensor().tolist() == [
        [1, 2], [3, 4],
    ]
    assert example_tensors({}) is None and example_tensors(None) is None


@pytest.mark.parametrize(("fields", "reason"), [
    ({}, "give exactly one of shape, values"),
    ({"shape": [1], "values": [1]}, "give exactly one of shape, values"),
    ({"shape": [10**4, 10**5]}, "shape has more than 100000000 numbers"),
    ({"shape": [0]}, "greater than 0"),
    ({"values": [[1, 2], [3]]}, "values are not a tensor of float32"),
    ({"values": ["a"]}, "values are not a tensor of float32"),
    ({"values": [1000], "dtype": "int8"}, "values are not a tensor of int8"),
    ({"values": [None]}, "values are not a tensor of float32"),
])  # fmt: skip
def test_other_examples_are_refused_with_the_reason(fields, reason):
    with pytest.raises(ValidationError, match=reason):
        ExampleSection.model_validate(fields)
