"""Runs with bf16 weights resume bit for bit, and are exported."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from raymm.storage.checkpoint import CheckpointStore
from tests.support.tiny_run import STEPS, checkpoint_tensors, curve, heldout_rows


@pytest.mark.parametrize("rule", [
    {"parameters": "bf16_master"}, {"parameters": "bf16_stochastic", "name": "adamw_8bit"},
])
def test_a_bf16_run_resumes_and_is_exported(ray_cluster, raymm, make_config, tmp_path, rule):
    changes = {
        "run.precision": "bf16", "run.steps": 4, "run.keep_checkpoints": 4,
        **{f"optimizer.{name}": value for name, value in rule.items()},
    }
    config, run = make_config(changes), tmp_path / "run"
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
    code, text = raymm("train", make_config({**changes, "run.precision": "auto"}))
    assert code == 0 and "run.precision" not in text  # the checkpoint's
    config = make_config(changes)
    other = make_config({"run.precision": "bf16", "run.steps": 5})
    code, text = raymm("train", other)
    assert code == 2 and "optimizer.parameters is 'fp32'" in text

    assert raymm("export", config, "--out", str(tmp_path / "out"))[0] == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out/language_model")
    name = "model.layers.0.mlp.up_proj.weight"
    assert model.state_dict()[name].equal(again[f"llm/module.{name}"])


def test_averages_are_evaluated_and_exported(finished, raymm, inputs, make_config, tmp_path):
    """Check that averages do not change the training itself.

    Resumption is tested in :mod:`test_averages_in_phases`.
    """
    config, run = make_config({
        "run.eval_every": STEPS, "run.eval_shuffled": False,
        "data.heldout": str(inputs / "heldout.jsonl"),
        "optimizer.ema": {"decay": 0.5, "evaluate": True},
    }), tmp_path / "run"
    assert raymm("train", config)[0] == 0
    stored, losses = checkpoint_tensors(run), heldout_rows(run)
    averaged = {name for name in stored if name.endswith("/ema")}
    moments = {name for name in stored if name.endswith("/exp_avg_sq")}
    assert averaged >= {name.replace("exp_avg_sq", "ema") for name in moments} and moments
    assert curve(run) == curve(finished.path)
    assert heldout_rows(finished.path)[-1]["heldout_loss"] != losses[-1]["heldout_loss"]

    assert raymm("export", config, "--out", str(tmp_path / "out"), "--ema")[0] == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out/language_model")
    name = "model.layers.0.mlp.up_proj.weight"
    assert model.state_dict()[name].equal(stored[f"optimizer/llm/module.{name}/ema"])
    code, text = raymm("export", finished.config, "--out", str(tmp_path / "none"), "--ema")
    assert code == 2 and "has no averaged weights" in text
