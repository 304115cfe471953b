"""Outputs of towers as tensors of a message."""

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from raymm.actors.stages.features import Form
from raymm.errors import ModelError


def assert_equal(value, due):
    torch.testing.assert_close(value, due, rtol=0, atol=0)


@pytest.mark.parametrize("output", [
    torch.randn(3, 2),
    [torch.randn(2, 4), torch.randn(3, 4)],
    (torch.randn(1, 2), [torch.randn(2, 4), torch.randn(1, 4)], torch.tensor([2, 1]), None),
    {"features": torch.randn(2, 2), "grid": torch.tensor([[1, 2]])},
])
def test_an_output_is_rebuilt_from_its_tensors(output):
    form = Form.of(output)
    tensors, side = form.packed(output)
    assert all(tensor.is_floating_point() for tensor in tensors)
    assert_equal(form.unpacked(tensors, side), output)


def test_entries_that_nobody_reads_are_not_sent():
    output = {"hidden": torch.randn(1, 2), "pooled": torch.randn(3, 2)}
    form = Form.of(output).reading([False, True])
    tensors, side = form.packed(output)
    assert len(tensors) == 1
    rebuilt = form.unpacked(tensors, side)
    assert rebuilt["hidden"] is None and torch.equal(rebuilt["pooled"], output["pooled"])


def test_only_named_fields_are_read():
    output = BaseModelOutputWithPooling(torch.randn(1, 2), torch.randn(1, 3))
    form = Form.of(output, ("pooler_output",))
    (tensor,), _ = form.packed(output)
    assert tensor is output.pooler_output


def test_another_structure_is_an_error():
    form = Form.of([torch.randn(2, 4), torch.randn(3, 4)])
    with pytest.raises(ModelError, match="features have the structure"):
        form.packed((torch.randn(2, 4), [torch.randn(3, 4)]))
