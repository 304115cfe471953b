"""Rows of samples in messages, and sums of their gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymm.actors.modules.message import Message
from raymm.actors.modules.message_samples import (
    cut_message,
    gradients_of,
    joined,
    of_all_ports,
    shape_entry,
    summed_gradients,
    used_tensors,
    with_ports,
)
from raymm.errors import ModelError
from raymm.scheduler.graph.sample_ranges import Range
from raymm.scheduler.plan.port_routes import EdgePorts


def message_of(rows: int) -> Message:
    tensor = torch.arange(float(2 * rows)).view(rows, 2)
    side = {"ids": torch.arange(rows), **dict([shape_entry("x", torch.zeros(rows, 5))])}
    return Message((tensor,), side)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=6), st.data())
def test_cut_replicas_join_to_the_microbatch(counts, data) -> None:
    offsets = [sum(counts[:n]) for n in range(len(counts) + 1)]
    middle = data.draw(st.integers(1, len(counts) - 1))
    every = (Range(0, len(counts)),)
    parts = [(Range(0, middle),), (Range(middle, len(counts)),)]
    whole = message_of(offsets[-1])
    cut = [cut_message(whole, every, part, offsets) for part in parts]
    assert [len(part.tensors[0]) for part in cut] == [
        offsets[middle], offsets[-1] - offsets[middle]
    ]
    again = joined("vision", cut)
    assert torch.equal(again.tensors[0], whole.tensors[0])
    assert {n: v.tolist() for n, v in again.side.items()} == {
        n: v.tolist() for n, v in whole.side.items()
    }
    gradients = [Message(part.tensors, {}) for part in cut]
    summed = summed_gradients(gradients, parts, every, offsets)
    assert torch.equal(summed.tensors[0], whole.tensors[0])


def test_gradients_of_the_same_samples_are_added() -> None:
    every = (Range(0, 3),)
    grads = [message_of(3)._replace(side={}) for _ in range(2)]
    total = summed_gradients(grads, [every, every], every, None)
    assert torch.equal(total.tensors[0], 2 * grads[0].tensors[0])


def test_replicas_with_different_widths_are_named() -> None:
    parts = [Message((torch.zeros(1, width),), {}) for width in (2, 3)]
    with pytest.raises(ModelError, match=r"replicas of 'vision' have shapes \(1, 2\) and \(1, 3\)"):
        joined("vision", parts)


def test_an_edge_carries_its_ports() -> None:
    tensors = tuple(torch.full((2,), float(n)) for n in range(3))
    message = Message(tensors, {"mask": torch.ones(1)}, ("", "deep", "wide"))
    ports = EdgePorts(names=("deep",), withheld=("wide",))
    carried = with_ports(message, ports)
    assert carried.names == ("", "deep") and carried.tensors == tensors[:2]
    assert carried.side["shape/float32/wide"].tolist() == [2]
    assert of_all_ports((tensors[0], None), message, ports) == (tensors[0], None, None)
    alone = EdgePorts(names=("deep",), alone=True)
    assert with_ports(message, alone).names == ("deep",) and not with_ports(message, alone).side
    assert of_all_ports((tensors[1],), message, alone) == (None, tensors[1], None)


def test_unused_tensors_have_no_gradient() -> None:
    gradient = torch.ones(2)
    side = used_tensors([gradient, None], sent=True, agree=None)
    received = Message((gradient, torch.zeros(2)), side)
    assert gradients_of(received)[0] is gradient and gradients_of(received)[1] is None
    assert used_tensors([gradient], sent=False, agree=None) == {}
    together = used_tensors([None], sent=False, agree=lambda flags: flags | 1)
    assert together["used"].tolist() == [1]
