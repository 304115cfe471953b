"""Runs with stage hooks: recovery, resume, and what is refused."""

import pytest

from tests.support.tiny_run import STEPS, curve

NOISE = {"model.stage_hooks": {"vision": ["tests.support.stage_hook_classes:Noise"]}}


def test_noise_survives_a_stop_and_a_killed_rank(make_config, raymm, tmp_path, ray_cluster):
    """Check bitwise equality with a run that nothing interrupts."""
    whole, run = tmp_path / "whole", tmp_path / "hooked"
    assert raymm("train", make_config({**NOISE, "run.storage_path": str(whole)}))[0] == 0
    changes = {
        **NOISE, "run.storage_path": str(run), "run.max_failures": 0, "run.snapshot_every": 2,
        "optimizer.total_steps": STEPS,
        "run.callbacks": [{"tests.support.killing_callbacks:KillRanks": {"after": [9]}}],
    }
    assert raymm("train", make_config({**changes, "run.steps": 5}))[0] == 0
    code, text = raymm("train", make_config({**changes, "run.steps": STEPS}))
    assert code == 0 and text.count("recovering in place") == 1, text
    assert curve(run) == curve(whole)
    del changes["model.stage_hooks"]
    code, text = raymm("train", make_config({**changes, "run.steps": STEPS + 1}))
    assert code != 0 and "model.stage_hooks.vision.0" in text and "allow_changes" in text, text


@pytest.mark.parametrize("changes, words", [
    ({"model.stage_hooks": {"audio": ["tests.support.stage_hook_classes:Noise"]}},
     "model.stage_hooks.audio[0]: a stage hook is for 'audio'; accepted: encoders of the model"),
    ({"model.stage_hooks": {"vision": ["tests.support.stage_hook_classes:Absent"]}},
     "model.stage_hooks.vision[0]: import path "
     "'tests.support.stage_hook_classes:Absent' cannot be resolved"),
    ({"model.stage_hooks": {"vision": ["tests.support.stage_hook_classes:Scaled"]}},
     "model.stage_hooks.vision[0]: tests.support.stage_hook_classes:Scaled() raised TypeError"),
    ({**NOISE, "model.encoders.vision.train": "frozen", "cache": {"features": "host"}},
     "cache is given, and model.stage_hooks has hooks of vision"),
])  # fmt: skip
def test_invalid_hooks_are_refused(make_config, raymm, no_new_actors, changes, words):
    code, text = raymm("train", make_config(changes))
    assert code != 0 and words in text, text
