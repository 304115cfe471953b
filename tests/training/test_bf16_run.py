"""Runs whose weights are in bf16 go on bit for bit, and are exported."""

import shutil

import pytest
import torch
from tiny_run import checkpoint_tensors, curve
from transformers import AutoModelForCausalLM

from raymm.storage.checkpoint import CheckpointStore


@pytest.mark.parametrize("rule", [
    {"parameters": "bf16_master"}, {"parameters": "bf16_stochastic", "name": "adamw_8bit"},
])
def test_a_run_goes_on_and_is_exported(ray_cluster, raymm, make_config, tmp_path, rule):
    config, run = make_config({
        "run.precision": "bf16", "run.steps": 4, "run.keep_checkpoints": 4,
        **{f"optimizer.{name}": value for name, value in rule.items()},
    }), tmp_path / "run"
    assert raymm("train", config)[0] == 0
    whole, stored = curve(run), checkpoint_tensors(run)
    assert {t.dtype for t in stored.values()} == {torch.float32}
    masters = [name for name in stored if name.endswith("/master")]
    assert bool(masters) == (rule["parameters"] == "bf16_master")
    for folder in CheckpointStore(run).committed():
        if folder.name != "step-00000002":
            shutil.rmtree(folder)
    assert raymm("train", config)[0] == 0
    assert curve(run) == whole
    again = checkpoint_tensors(run)
    assert all(again[name].equal(tensor) for name, tensor in stored.items())
    other = make_config({"run.precision": "bf16", "run.steps": 5})
    code, text = raymm("train", other)
    assert code == 2 and "optimizer.parameters is 'fp32'" in text

    assert raymm("export", config, "--out", str(tmp_path / "out"))[0] == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out/language_model")
    name = "model.layers.0.mlp.up_proj.weight"
    assert model.state_dict()[name].equal(again[f"llm/module.{name}"])
