"""Runs that freeze and unfreeze modules in phases.

Losses are compared with those of one process in :mod:`test_averages_in_phases`.
"""

import shutil

import pytest
import torch

from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.monitor.metrics import read_metrics
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import load_into_model
from tests.support.tiny_run import checkpoint_tensors, curve

VISION = "model.encoders.vision"
FROZEN = {f"{VISION}.train": "frozen", "run.steps": 6, "run.keep_checkpoints": 6}
AT = {2: {"vision": "full", "llm": "frozen"}, 4: {"llm": "full", "vision_projector": "frozen"}}


def test_phases(ray_cluster, raymm, make_config, tmp_path):
    config, run = make_config({**FROZEN, "at": AT}), tmp_path / "run"
    code, text = raymm("train", config)
    assert code == 0, text
    assert "after step 2 llm is frozen, vision is trained" in text
    assert "after step 4 llm is trained, vision_projector is frozen" in text
    whole, stored = curve(run), checkpoint_tensors(run)
    assert [row[0] for row in whole] == [1, 2, 3, 4, 5, 6]
    code, text = raymm("generate", config, "--prompt", "what is this", "--max-tokens", "2")
    assert code == 0 and "> what is this\n" in text, text

    # Trained modules change, frozen ones do not, and modules that stay trained keep their moments.
    states = [checkpoint_of(run, step) for step in (2, 4, 6)]
    first = "vision/module.encoder.layers.0.mlp.fc1.weight"
    last = "llm/module.model.layers.1.mlp.up_proj.weight"
    projector = "vision/projector.layers.0.weight"
    assert not states[0][first].equal(states[1][first])
    assert states[0][last].equal(states[1][last]) and not states[1][last].equal(states[2][last])
    assert states[1][projector].equal(states[2][projector])
    steps = [{n: s[f"optimizer/{n}/step"].item() for n in (first, last, projector)
              if f"optimizer/{n}/step" in s} for s in states]
    assert steps == [{last: 2, projector: 2}, {first: 2, projector: 4}, {first: 4, last: 2}]

    # It resumes bit for bit from the end of the first phase.
    for folder in CheckpointStore(run).committed():
        if folder.name != "step-00000002":
            shutil.rmtree(folder)
    assert raymm("train", config)[0] == 0
    assert curve(run) == whole
    again = checkpoint_tensors(run)
    assert set(again) == set(stored)
    assert all(again[name].equal(tensor) for name, tensor in stored.items())

    # The modules trained up to the checkpoint must match the configuration of its steps.
    for folder in CheckpointStore(run).committed():
        if folder.name != "step-00000004":
            shutil.rmtree(folder)
    code, text = raymm("train", make_config({**FROZEN, "at": {4: AT[2]}}, "other.yaml"))
    assert code == 2 and "in the model, but" in text and "trained in the checkpoint" in text
    model = build_model(load_config(config))
    load_into_model(model, CheckpointStore(run).latest())


def checkpoint_of(run, step) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors = {}
    for file in sorted((run / f"checkpoints/step-{step:08d}").glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def test_each_phase_has_its_own_plan(ray_cluster, raymm, make_config, tmp_path):
    """Omit layouts, so that each phase has its own plan."""
    config = make_config({
        **FROZEN, "parallel": {}, "run.steps": 2, "at": {1: {"vision": "full"}},
        "planning.ranks": 2, "planning.degrees": "none",
    })
    code, text = raymm("train", config)
    assert code == 0, text
    assert "planning again: the checkpoint's plan is for a different model" in text
    assert len(read_metrics(tmp_path / "run/metrics.jsonl")) == 2


@pytest.mark.cells(1)
@pytest.mark.parametrize("base", [None, "int8"])
def test_adapters(ray_cluster, raymm, make_config, inputs, tmp_path, base):
    """Freeze adapters and train them again; their base never changes."""
    llm = "model.language_model"
    run, lora = tmp_path / "run", {"lora": {"r": 2, "base": base}}
    code, text = raymm("train", make_config({
        **FROZEN, f"{llm}.config": None, f"{llm}.path": str(inputs / "llama"),
        f"{llm}.train": lora, "at": {2: {"llm": "frozen"}, 4: {"llm": "full"}},
    }))
    assert code == 0, text
    states = [checkpoint_of(run, step) for step in (2, 4, 6)]
    layer = "llm/module.model.layers.1.mlp.up_proj"
    weights, adapters = ([s[f"{layer}.{leaf}"] for s in states] for leaf in ("weight", "lora_B"))
    assert weights[0].equal(weights[1]) and weights[0].equal(weights[2])
    assert adapters[0].equal(adapters[1]) and not adapters[1].equal(adapters[2])
    moments = [f"optimizer/{layer}.lora_B/step" in state for state in states]
    assert moments == [True, False, True]


def test_phases_with_elastic_replicas(ray_cluster, raymm, make_config, tmp_path):
    """Use as many replicas as there are resources for, which is all, in each phase."""
    many = {**FROZEN, "data.microbatches": 2, "run.steps": 2, "at": {1: {"vision": "full"}}}
    curves = []
    for name, dp in (("range", {"min": 1, "max": 2}), ("number", 2)):
        config = make_config({
            **many, "parallel": {"language_model": {"dp": dp}},
            "run.storage_path": str(tmp_path / name),
        }, f"{name}.yaml")
        code, text = raymm("train", config)
        assert code == 0 and "after step 1 vision is trained" in text, text
        curves.append(curve(tmp_path / name))
    assert curves[0] == curves[1] and len(curves[0]) == 2


@pytest.mark.parametrize(("changes", "says"), [
    ({"at": {2: {"audio": "full"}}}, "at names 'audio', which is not a part of the model"),
    ({"at": {2: {"llm": "half"}}}, "at.2.llm"),
    ({"at": {0: {"llm": "full"}}}, "at.0"),
])  # fmt: skip
def test_what_cannot_be(raymm, make_config, changes, says):
    code, text = raymm("train", make_config({**FROZEN, **changes}))
    assert code == 2 and says in " ".join(text.split()), text
