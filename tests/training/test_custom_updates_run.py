"""A run with a custom optimizer and schedule resumes bit for bit."""

import pytest
import torch
from tiny_run import checkpoint_tensors, curve

UPDATES = {
    "optimizer.name": "custom_updates:lion", "optimizer.schedule": "custom_updates:falling",
    "optimizer.warmup_steps": None, "optimizer.lr": 1e-3,
    "parallel": {
        "encoders": {"vision": {"ranks": [0]}},
        "language_model": {"dp": 2, "ranks": [0, 1], "sharding": "zero1"},
    },
}


def test_two_halves_equal_an_uninterrupted_run(raymm, make_config, tmp_path, ray_cluster):
    changes = {**UPDATES, "run.steps": 6}
    full = make_config({**changes, "run.storage_path": str(tmp_path / "full")}, "full.yaml")
    assert raymm("train", full)[0] == 0
    config = make_config({**changes, "run.storage_path": str(tmp_path / "halves")})
    assert raymm("train", config, "--set", "run.steps=3")[0] == 0
    assert raymm("train", config)[0] == 0
    assert curve(tmp_path / "halves") == curve(tmp_path / "full")
    assert [row[3] for row in curve(tmp_path / "full")] == [1e-3 * 0.5**n for n in range(6)]
    mine, theirs = checkpoint_tensors(tmp_path / "halves"), checkpoint_tensors(tmp_path / "full")
    assert mine.keys() == theirs.keys() and any("/average" in name for name in mine)
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


@pytest.mark.parametrize(("changes", "says"), [
    ({"optimizer.name": "custom_updates:absent"}, "optimizer.name is 'custom_updates:absent'"),
    ({"optimizer.name": "custom_updates:counting"}, "a resumed run would differ"),
    ({"optimizer.schedule": "custom_updates:late"}, "for step 4 it raised IndexError"),
    ({"optimizer.name": "custom_updates:normalised", "parallel": {
        "encoders": {"vision": {"ranks": [0]}}, "language_model": {"tp": 2, "ranks": [1]},
    }}, "tp of 'llm' is 2, under which no process has a full matrix"),
])  # fmt: skip
def test_what_cannot_be_exact_is_refused_first(raymm, make_config, changes, says):
    """``raymm plan`` runs the checks of ``raymm train`` without a cluster."""
    code, text = raymm("plan", make_config({**UPDATES, "run.steps": 6, **changes}))
    assert code == 2 and says in " ".join(text.split()), text
