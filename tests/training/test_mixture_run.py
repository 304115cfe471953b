"""``raymm train`` with a mixture of experts whose config requests a router loss."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from raymm.monitor.metrics import read_metrics
from tests.support.tiny_run import LLAMA, curve

STEPS = 3


@pytest.fixture
def mixture(tmp_path) -> str:
    torch.manual_seed(0)
    sizes = {name: value for name, value in LLAMA.items() if name != "model_type"}
    config = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2,
                           output_router_logits=True, router_aux_loss_coef=0.3)  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path / "mixture")
    return str(tmp_path / "mixture")


def test_layouts_agree_and_expert_loads_are_logged(
    make_config, raymm, mixture, tmp_path, ray_cluster
):
    layouts = {
        "whole": {"ranks": [0]},
        "cut": {"pp": 2, "dp": 2, "sharding": "fsdp", "ep": 2},
    }
    curves, loads = {}, {}
    for name, layout in layouts.items():
        changes = {
            "run.storage_path": str(tmp_path / name), "run.steps": STEPS,
            "run.checkpoint_every": STEPS, "model.language_model": {"path": mixture},
            "parallel.language_model": layout,
        }
        code, text = raymm("train", make_config(changes, f"{name}.yaml"))
        assert code == 0, text
        curves[name] = curve(tmp_path / name)
        rows = [row for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row]
        loads[name] = [row["expert_loads"] for row in rows]
        for row in rows:
            # Two layers of four experts; every token uses two.
            assert [len(load) for load in row["expert_loads"].values()] == [4, 4]
            (tokens,) = {sum(load) for load in row["expert_loads"].values()}
            assert tokens % 2 == 0
            worst = max(max(load) / (tokens / 4) for load in row["expert_loads"].values())
            assert row["worst_expert_imbalance"] == pytest.approx(worst)
    due = curves.pop("whole")
    assert len(due) == STEPS
    for name, steps in curves.items():
        for mine, expected in zip(steps, due, strict=True):
            assert mine == pytest.approx(expected, rel=1e-4)
        assert loads[name] == loads["whole"]
