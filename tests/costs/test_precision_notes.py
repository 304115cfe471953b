"""A run in fp32 on a GPU says what that costs."""

import pytest

from raymm.costs import named_devices
from raymm.costs.named_devices import precision_notes


@pytest.mark.parametrize("name, text", [
    ("H100", "up to 67 TFLOP/s on H100, with 'bf16' at 989 (15 times as fast)"),
    ("A100-80GB", "up to 20 TFLOP/s on A100-80GB, with 'bf16' at 312 (16 times as fast)"),
])  # fmt: skip
def test_fp32_on_a_gpu_says_the_factor(monkeypatch, name, text):
    monkeypatch.setattr(named_devices, "cluster_device", lambda device: (name, None))
    assert text in precision_notes("cuda", "fp32")[0]
    assert precision_notes("cuda", "bf16") == precision_notes("cpu", "fp32") == []
