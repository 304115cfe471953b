"""A run reports its GPU, and the cost of fp32."""

import pytest

from raymm.actors.host.gpus import Gpus
from raymm.actors.placement import node_types
from raymm.costs import named_devices
from raymm.costs.named_devices import cluster_device, device_names, precision_notes


@pytest.mark.parametrize("name, text", [
    ("H100", "up to 67 TFLOP/s on H100, with 'bf16' at 989 (15 times as fast)"),
    ("A100-80GB", "up to 20 TFLOP/s on A100-80GB, with 'bf16' at 312 (16 times as fast)"),
])  # fmt: skip
def test_fp32_on_a_gpu_reports_the_slowdown(monkeypatch, name, text):
    monkeypatch.setattr(named_devices, "cluster_device", lambda device: (name, None))
    assert text in precision_notes("cuda", "fp32")[0]
    assert precision_notes("cuda", "bf16") == precision_notes("cpu", "fp32") == []


@pytest.mark.parametrize("gpus, resources, names, device", [
    (Gpus("580.65.06", (13, 0), ("NVIDIA H100 80GB HBM3",) * 8), {"accelerator_type:H100": 1.0},
     ["NVIDIA H100 80GB HBM3", "H100"], "H100"),
    (None, {"CPU": 4.0, "accelerator_type:A100-80G": 1.0}, ["A100-80G"], "A100-80GB"),
    (None, {"CPU": 4.0}, [], named_devices.DEFAULT_GPU),
])  # fmt: skip
def test_gpus_have_the_name_of_driver_or_ray(monkeypatch, gpus, resources, names, device):
    monkeypatch.setattr(named_devices, "read_gpus", lambda: gpus)
    monkeypatch.setattr(node_types, "reachable_resources", lambda: resources)
    assert device_names("cuda") == names
    assert cluster_device("cuda")[0] == device
    assert device_names("cpu") == []
