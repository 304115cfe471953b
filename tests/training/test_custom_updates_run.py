"""A run with a custom optimizer and schedule resumes bit for bit."""

import pytest
import torch

from tests.support.tiny_run import checkpoint_tensors, curve, remove_checkpoints

UPDATES = {
    "optimizer.name": "tests.support.custom_updates:lion",
    "optimizer.schedule": "tests.support.custom_updates:falling",
    "optimizer.warmup_steps": None, "optimizer.lr": 1e-3,
    "parallel": {
        "encoders": {"vision": {"ranks": [0]}},
        "language_model": {"dp": 2, "ranks": [0, 1], "sharding": "zero1"},
    },
}


def test_a_resumed_run_equals_an_uninterrupted_one(raymm, make_config, tmp_path, ray_cluster):
    config, run = make_config({**UPDATES, "run.steps": 6}), tmp_path / "run"
    assert raymm("train", config)[0] == 0
    whole, theirs = curve(run), checkpoint_tensors(run)
    remove_checkpoints(run, after=4)
    code, text = raymm("train", config)
    assert code == 0 and "step-00000004" in text
    assert curve(run) == whole
    assert [row[3] for row in whole] == [1e-3 * 0.5**n for n in range(6)]
    mine = checkpoint_tensors(run)
    assert mine.keys() == theirs.keys() and any("/average" in name for name in mine)
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


@pytest.mark.parametrize(("changes", "says"), [
    ({"optimizer.name": "tests.support.custom_updates:absent"},
     "optimizer.name is 'tests.support.custom_updates:absent'"),
    ({"optimizer.name": "tests.support.custom_updates:counting"}, "a resumed run would differ"),
    ({"optimizer.schedule": "tests.support.custom_updates:late"},
     "for step 4 it raised IndexError"),
    ({"optimizer.name": "tests.support.custom_updates:normalised", "parallel": {
        "encoders": {"vision": {"ranks": [0]}}, "language_model": {"tp": 2, "ranks": [1]},
    }}, "tp of 'llm' is 2, under which no process has a full matrix"),
])  # fmt: skip
def test_what_cannot_be_exact_is_refused_first(raymm, make_config, changes, says):
    """``raymm plan`` runs the checks of ``raymm train`` without a cluster."""
    code, text = raymm("plan", make_config({**UPDATES, "run.steps": 6, **changes}))
    assert code == 2 and says in " ".join(text.split()), text
