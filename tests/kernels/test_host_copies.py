"""Tensors on a device keep their values on the host until they change."""

from __future__ import annotations

import torch

from raymm.kernels.host_copies import on_host, remember, to_device

CPU, META = torch.device("cpu"), torch.device("meta")


def test_host_tensors_are_returned_unchanged():
    tensor = torch.arange(3)
    assert to_device(tensor, CPU) is tensor and on_host(tensor) is tensor


def test_remembered_values_are_returned_without_reading_the_device():
    """A meta tensor has no values, so reading it would raise."""
    host, there = torch.arange(3), torch.empty(3, dtype=torch.int64, device=META)
    remember(there, host)
    assert on_host(there) is host


def test_values_are_forgotten_when_the_tensor_changes():
    host, there = torch.arange(3), torch.empty(3, dtype=torch.int64, device=META)
    remember(there, host)
    there.add_(1)
    try:
        found = on_host(there)
    except NotImplementedError:  # meta tensors cannot be read
        return
    assert found is not host


def test_other_devices_get_an_ordinary_copy():
    assert to_device(torch.arange(3), META).device == META
