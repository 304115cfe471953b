"""Run of a VLM that freezes and trains parts in phases.

Losses are those of a loop over the model's own forward that does the same.
"""

from __future__ import annotations

import pytest
import torch
import yaml

from raymm.cli.main import main
from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.data import local_steps
from raymm.model.vlm import PretrainedVlm
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import load_into_model
from raymm.training.run_start import with_vocabulary
from tests.support.tiny_folders import modalities, tiny
from tests.support.tiny_run import checkpoint_tensors, curve
from tests.support.trainer_groups import trainer_groups

pytestmark = pytest.mark.usefixtures("ray_cluster")
STEPS, LR = 3, 1e-3
AT = {1: {"vision": "full", "language_model": "frozen"}, 2: {"projector": "frozen"}}


def configuration(tmp_path, **at):
    folder, data = tiny("idefics3")
    values = {
        "run": {
            "storage_path": str(tmp_path / "run"), "steps": STEPS, "device": "cpu", "seed": 3,
            "keep_checkpoints": 6,
        },
        "model": {"path": folder, "train": {"vision": "frozen"}},
        "data": {
            "train": data, "modalities": modalities("idefics3"), "batch_size": 4,
            "microbatches": 2,
        },
        "parallel": {"language_model": {}, "encoders": {"vision": {"pp": 2}}},
        "optimizer": {"lr": LR, "max_grad_norm": None, "schedule": "constant", "warmup_steps": 0},
        "resources": {"cpus": 0.1},
        **at,
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return str(file)


def losses_in_one_process(config):
    """Train with one optimizer; some parameters have no gradient for a while."""
    model = build_model(config)
    assert isinstance(model, PretrainedVlm)
    module, rule = model.materialize(), config.optimizer.build(STEPS)
    places = {"vision": model.tower("vision").root + "."}
    others = [p for p in model.tower("vision").places if p + "." != places["vision"]]

    def part_of(name):
        if name.startswith(places["vision"]):
            return "vision"
        inside = any(name == p or name.startswith(p + ".") for p in others)
        return "projector" if inside else "language_model"

    named = dict(module.named_parameters())
    trained = {n for n in named if part_of(n) != "vision"}
    optimizer = torch.optim.AdamW(
        trainer_groups(module, rule.weight_decay), lr=LR, betas=rule.betas, eps=rule.eps
    )
    losses = []
    for step in local_steps(with_vocabulary(config.data, model), steps=STEPS):
        for part, how in AT.get(len(losses), {}).items():
            own = {n for n in named if part_of(n) == part}
            trained = trained | own if how == "full" else trained - own
        for name, parameter in named.items():
            parameter.requires_grad_(name in trained)
            if name not in trained:
                optimizer.state.pop(parameter, None)
        module.eval()  # it uses no random numbers
        optimizer.zero_grad()
        loss = model.loss(step.microbatches)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_phases_of_a_vlm(tmp_path, capsys):
    file = configuration(tmp_path, at=AT)
    assert main(["train", file]) == 0
    text = capsys.readouterr().out
    assert "after step 1 vision is trained, language_model is frozen" in text
    assert "after step 2 projector is frozen" in text
    losses = [row[1] for row in curve(tmp_path / "run")]
    assert losses == pytest.approx(losses_in_one_process(load_config(file)), rel=1e-5)
    stored = checkpoint_tensors(tmp_path / "run")
    moments = {n.split("/")[1] for n in stored if n.startswith("optimizer/") and "/step" in n}
    assert moments == {"vision"}
    model = build_model(load_config(file))
    assert isinstance(model, PretrainedVlm)
    load_into_model(model, CheckpointStore(tmp_path / "run").latest())


def test_an_unknown_part_is_rejected(tmp_path, capsys):
    file = configuration(tmp_path, at={2: {"llm": "frozen"}})
    assert main(["train", file]) == 2
    text = capsys.readouterr()
    accepted = "which is not a part of the model; accepted: vision, projector, language_model"
    assert accepted in " ".join((text.out + text.err).split())
