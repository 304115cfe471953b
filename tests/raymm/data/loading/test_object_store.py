"""Tensors from Ray's object store have the same bytes, stacked and writable."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymm.data.loading.object_store import ItemStack, StoredTensors

DTYPES = [
    torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64,
    torch.uint16, torch.float8_e4m3fn,
]  # fmt: skip


def through_store(tensors):
    """Copy tensors as the object store does: buffers out of band, read-only afterwards."""
    buffers = []
    data = pickle.dumps(tensors, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(one.raw()) for one in buffers]), data, buffers


@given(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(1, 4),
    st.integers(0, 2**16),
)
def test_a_stored_stack_equals_torch_stack(dtype, shape, count, seed):
    generator = torch.Generator().manual_seed(seed)
    items = [torch.randint(0, 2, shape, generator=generator).to(dtype) for _ in range(count)]
    stack = ItemStack(items)
    want = torch.stack(items)
    assert (stack.shape, stack.dtype) == (want.shape, want.dtype)
    got, _, _ = through_store(StoredTensors({"x": stack, "y": want}))
    assert type(got) is dict and list(got) == ["x", "y"]
    for tensor in got.values():
        torch.testing.assert_close(tensor, want, rtol=0, atol=0)
        tensor.zero_()  # its original bytes are read-only


def test_items_are_not_copied_before_they_are_stored():
    items = [torch.zeros(1000) for _ in range(3)]
    _, data, buffers = through_store(StoredTensors({"x": ItemStack(items)}))
    addresses = [memoryview(one) for one in buffers]
    assert len(data) < 1000 and [one.nbytes for one in addresses] == [4000] * 3
    items[1].fill_(1)
    assert bytes(addresses[1]) == items[1].numpy().tobytes()


@pytest.mark.parametrize("change", [
    lambda x: x.transpose(1, 2), lambda x: torch.complex(x, -x).conj().imag,
])  # fmt: skip
def test_views_that_differ_from_their_memory(change):
    """Use views in another order, or with the opposite sign."""
    items = list(change(torch.arange(24.0).reshape(2, 3, 4)))
    got, _, _ = through_store(StoredTensors({"x": ItemStack(items)}))
    torch.testing.assert_close(got["x"], torch.stack(items), rtol=0, atol=0)


@pytest.mark.parametrize("order", [[2, 0, 1], [1], [0, 0]])
def test_a_stack_in_another_order(order):
    items = [torch.full((2,), float(i)) for i in range(3)]
    moved = ItemStack(items)[torch.tensor(order)]
    assert moved.shape == (len(order), 2)
    assert torch.equal(torch.stack(moved.items), torch.stack(items)[order])
