"""Rates of a step, from counted FLOPs and its seconds."""

import pytest

from raymm.actors.modules.merge import ReplaceTokens
from raymm.costs.step_flops import StepFlops, VlmStepFlops
from raymm.monitor.throughput import Throughput
from raymm.scheduler.costs.devices import find_device
from tests.raymm.costs.test_step_flops import IMAGE, batch, described, metadata
from tests.raymm.costs.test_vlm_step_flops import described as described_vlm

REPLACE = ReplaceTokens({"vision": IMAGE})
META = metadata([batch([7, 7], [0, 1])])


def throughput_of(model, device="cpu"):
    said = []
    processes = {"vision": 1, "llm": 2, "total": 3}
    return Throughput(model, processes, device, "bf16", said.append), said


def test_rates_are_flops_over_seconds_and_counted_once(monkeypatch):
    model = described()
    throughput, said = throughput_of(model)
    throughput.count()
    monkeypatch.setattr(type(model), "spec", None)  # a second count would call it
    row = throughput.after_step(META, 2.0)
    monkeypatch.undo()
    flops = StepFlops(model).of(META)
    assert set(row) == {"tflops"} and said == []
    assert row["tflops"] == pytest.approx(
        {name: n / 2e12 for name, n in {**flops, "total": sum(flops.values())}.items()}, rel=1e-3
    )


def test_utilization_is_relative_to_the_gpus_of_a_module(monkeypatch):
    monkeypatch.setattr("raymm.costs.named_devices.device_names", lambda device: ["NVIDIA H100"])
    throughput, _ = throughput_of(described(), "cuda")
    row = throughput.after_step(META, 1e-9)
    peak = find_device("H100").peak("bf16")
    assert row["mfu"]["llm"] == pytest.approx(1e12 * row["tflops"]["llm"] / (2 * peak), rel=1e-3)
    assert set(row["mfu"]) == {"vision", "llm", "total"}


def test_a_gpu_without_a_known_peak_has_no_utilization(monkeypatch):
    monkeypatch.setattr("raymm.costs.named_devices.device_names", lambda device: ["Unknown 1"])
    throughput, _ = throughput_of(described(), "cuda")
    assert set(throughput.after_step(META, 1.0)) == {"tflops"}


def test_a_batch_that_cannot_be_counted_ends_the_counting():
    throughput, said = throughput_of(described(mask="multimodal", merge=REPLACE))
    assert throughput.after_step(META, 1.0) == throughput.after_step(META, 1.0) == {}
    assert len(said) == 1 and said[0].startswith("no TFLOP/s: the model's mask needs the places")


def test_rates_of_a_vlm_are_those_of_its_modules():
    model, step = described_vlm("gemma3", {})
    said = []
    throughput = Throughput(model, {"vision": 1, "llm": 1, "total": 2}, "cpu", "fp32", said.append)
    row = throughput.after_step(step.meta, 2.0)
    flops = VlmStepFlops(model).of(step.meta)
    flops["total"] = sum(flops.values())
    due = {name: each / 2e12 for name, each in flops.items()}
    assert row["tflops"] == pytest.approx(due, rel=1e-3)
    assert said == []
