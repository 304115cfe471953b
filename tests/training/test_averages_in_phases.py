"""Moving averages and tied embeddings in a run that freezes and trains modules in phases.

They equal those of a loop in one process that does the same.
"""

import shutil

import pytest
import torch

from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.data import local_steps
from raymm.model.multimodal import MultimodalModule
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import load_into_model
from tests.support.parity_check import oracle_of
from tests.support.tiny_run import checkpoint_tensors, curve
from tests.support.trainer_groups import trainer_groups

DECAY, STEPS = 0.5, 6
AT = {2: {"vision": "full", "llm": "frozen"}, 4: {"llm": "full", "vision": "frozen"}}
CHANGES = {
    "model.encoders.vision.train": "frozen", "run.steps": STEPS, "run.keep_checkpoints": STEPS,
    "run.checkpoint_every": 1, "at": AT, "optimizer.ema": {"decay": DECAY},
    "optimizer.schedule": "constant", "optimizer.warmup_steps": 0, "optimizer.eps": 1e-5,
}
ENCODER, LLM = "vision_encoder.module", "language_model.module"


def built(config) -> MultimodalModule:
    model = build_model(config)
    assert isinstance(model, MultimodalModule)
    return model


def loop_in_one_process(config):
    """Return the losses, and the averages of all weights after every step, including frozen ones.
    """
    oracle, rule = oracle_of(built(config)), config.optimizer.build(STEPS)
    named = dict(oracle.named_parameters())
    optimizer = torch.optim.AdamW(
        trainer_groups(oracle, rule.weight_decay), lr=rule.lr, betas=rule.betas, eps=rule.eps
    )
    average, losses, averages = {n: p.detach().clone() for n, p in named.items()}, [], []
    for number, step in enumerate(local_steps(config.data, steps=STEPS)):
        frozen = {0: ENCODER, 1: LLM, 2: ENCODER}[number // 2]
        for name, parameter in named.items():
            parameter.requires_grad_(not name.startswith(frozen))
            if name.startswith(frozen):
                optimizer.state.pop(parameter, None)
        optimizer.zero_grad()
        loss = oracle.loss(step.microbatches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(oracle.parameters(), rule.max_grad_norm)
        optimizer.step()
        average = {name: value.lerp(named[name].detach(), 1 - DECAY)
                   for name, value in average.items()}
        losses.append(loss.item())
        averages.append(average)
    return losses, averages


def test_averages_follow_frozen_modules(ray_cluster, raymm, make_config, tmp_path):
    config, run = make_config(CHANGES), tmp_path / "run"
    code, text = raymm("train", config)
    assert code == 0, text
    losses, averages = loop_in_one_process(load_config(config))
    whole, stored = curve(run), checkpoint_tensors(run)
    assert [row[1] for row in whole] == pytest.approx(losses, rel=1e-4)
    for number, due in enumerate(averages, 1):
        model = built(load_config(config))
        load_into_model(model, run / f"checkpoints/step-{number:08d}", averaged=True)
        actual = dict(oracle_of(model).named_parameters())
        for name, average in due.items():
            torch.testing.assert_close(actual[name].detach(), average, rtol=0, atol=2e-5, msg=name)

    # A run resumes bit for bit from the middle of a phase.
    for folder in CheckpointStore(run).committed():
        if str(folder)[-8:] > "00000003":
            shutil.rmtree(folder)
    assert raymm("train", config)[0] == 0
    assert curve(run) == whole
    again = checkpoint_tensors(run)
    assert set(again) == set(stored)
    assert all(again[name].equal(tensor) for name, tensor in stored.items())
