"""A resumed run has the numbers of an uninterrupted one."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from raymm.actors.optimizer.stored_tensors import StoredTensors
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.manifest import read_manifest
from tests.support.tiny_run import checkpoint_tensors, curve, heldout_rows, remove_checkpoints


def assert_same_state(run, other):
    mine, theirs = checkpoint_tensors(run), checkpoint_tensors(other)
    assert mine.keys() == theirs.keys() and any("exp_avg_sq" in name for name in mine)
    different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not different


def test_two_halves_equal_an_uninterrupted_run_bitwise(finished, raymm, make_config, tmp_path):
    config = make_config()
    code, _ = raymm("train", config, "--set", "run.steps=5")
    assert code == 0 and [row[0] for row in curve(tmp_path / "run")] == [1, 2, 3, 4, 5]
    code, text = raymm("train", config)
    assert code == 0 and "resuming from" in text and "step-00000005" in text
    assert curve(tmp_path / "run") == curve(finished.path)
    assert_same_state(tmp_path / "run", finished.path)


@pytest.mark.cells(2)
@pytest.mark.parametrize("layout", [
    {"language_model": {"ranks": [0]}, "encoders": {"vision": {"pp": 2, "ranks": [0, 1]}}},
    {"language_model": {"dp": 2, "ranks": [0, 1]}, "encoders": {"vision": {"ranks": [0]}}},
    {"language_model": {"tp": 2, "cp": 2}, "encoders": {"vision": {"tp": 2, "dp": 2}}},
    {"language_model": {"dp": 2, "sharding": "fsdp"},
     "encoders": {"vision": {"dp": 2, "sharding": "fsdp"}}},
], ids=["stages", "copies", "pieces", "fsdp"])  # fmt: skip
def test_another_layout_resumes_from_the_same_checkpoint(
    finished, raymm, make_config, tmp_path, layout
):
    """Resume with other stages, two language model replicas, or sharded parameters.

    Parameters and optimizer state are the same, rounding differs.
    """
    run = finished.copy_until(tmp_path / "run", 10)
    config = make_config({"parallel": layout})
    code, _ = raymm("train", config)
    assert code == 0
    steps = list(zip(curve(run), curve(finished.path), strict=True))
    assert all(mine == original for mine, original in steps[:10])
    for mine, original in steps[10:]:
        assert abs(mine[1] - original[1]) < 1e-4 and mine[3] == original[3]


@pytest.mark.cells(1)
@pytest.mark.parametrize("pieces", [
    {"language_model": {"dp": 3, "sharding": "fsdp"},
     "encoders": {"vision": {"pp": 2, "dp": 2, "sharding": "fsdp"}}},
    {"language_model": {"tp": 2, "dp": 2, "sharding": "zero1"},
     "encoders": {"vision": {"cp": 2, "sharding": "zero1"}}},
], ids=["fsdp", "pieces"])  # fmt: skip
def test_a_sharded_checkpoint_resumes_under_any_layout(
    finished, raymm, make_config, tmp_path, pieces
):
    """Save sharded parameters, whose optimizer state is at one of several owners.

    The checkpoint is read under the standard layout, and exported.
    """
    run = tmp_path / "run"
    code, _ = raymm("train", make_config({"parallel": pieces}), "--set", "run.steps=3")
    assert code == 0
    folder = CheckpointStore(run).latest()
    manifest = read_manifest(folder)
    names = manifest.index
    assert any(name.startswith("optimizer/") and name.endswith("]") for name in names)
    code, _ = raymm("export", make_config(), "--out", str(tmp_path / "export"))
    assert code == 0
    exported = load_file(tmp_path / "export/language_model/model.safetensors")
    stored = StoredTensors(folder, names, manifest.shards)
    for name, tensor in exported.items():
        found = stored.read({f"llm/module.{name}": None})
        assert torch.equal(found[f"llm/module.{name}"], tensor)
    code, _ = raymm("train", make_config(), "--set", "run.steps=5")
    assert code == 0
    for mine, original in zip(curve(run), curve(finished.path)[:5], strict=True):
        assert abs(mine[1] - original[1]) < 1e-4 and mine[3] == original[3]


def test_rows_after_the_checkpoint_are_repeated_once(finished, raymm, make_config, tmp_path):
    """Resume from step 10 with rows of steps 11 and 12, and with a torn checkpoint.

    The torn checkpoint is left by a crash in the middle of a save.
    """
    run = finished.copy_until(tmp_path / "run", 10)
    torn = run / "checkpoints" / "step-00000012"
    torn.mkdir()
    (torn / "model-rank0.safetensors").write_bytes(b"half of a sha")
    (torn / ".not-committed.raymm-partial").touch()
    code, text = raymm("train", make_config())
    assert code == 0 and f"removed {torn}, which was never committed" in text
    assert curve(run) == curve(finished.path)
    assert [row["step"] for row in heldout_rows(run)] == [0]  # the row of step 12 was dropped
    assert_same_state(run, finished.path)


def test_a_truncated_shard_is_named_before_anything_starts(
    finished, raymm, make_config, tmp_path, no_new_actors
):
    run = finished.copy_until(tmp_path / "run", 10)
    shard = run / "checkpoints" / "step-00000010" / "optimizer-rank1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    code, text = raymm("train", make_config())
    assert code == 2 and "CheckpointError" in text and str(shard) in text
    assert "Traceback" not in text


def test_a_damaged_manifest_is_named(finished, raymm, make_config, tmp_path, no_new_actors):
    run = finished.copy_until(tmp_path / "run", 10)
    manifest = run / "checkpoints" / "step-00000010" / "manifest.json"
    manifest.write_text(manifest.read_text()[:100])
    code, text = raymm("train", make_config())
    assert code == 2 and "CheckpointError" in text and str(manifest) in text


def test_a_corrupt_shard_is_named_before_anything_starts(
    finished, raymm, make_config, tmp_path, no_new_actors
):
    run = finished.copy_until(tmp_path / "run", 10)
    shard = run / "checkpoints" / "step-00000010" / "model-rank1.safetensors"
    shard.write_bytes(b"\xff" * len(shard.read_bytes()))
    code, text = raymm("train", make_config())
    assert code == 2 and "CheckpointError" in text and str(shard) in text
    assert "Traceback" not in text
    code, text = raymm("export", make_config(), "--out", str(tmp_path / "out"))
    assert code == 2 and "CheckpointError" in text and str(shard) in text
    assert not (tmp_path / "out").exists()


def test_packing_changes_only_rounding(finished, raymm, make_config, tmp_path):
    """Pack samples into sequences of documents in the second half of the run."""
    run = finished.copy_until(tmp_path / "run", 8)
    code, _ = raymm("train", make_config({"model.packing": True}))
    assert code == 0
    for mine, original in zip(curve(run), curve(finished.path), strict=True):
        assert abs(mine[1] - original[1]) < 1e-4 and mine[3] == original[3]


def test_running_statistics_are_restored(raymm, make_config, inputs, tmp_path, ray_cluster):
    """Resume a trained encoder from a factory: its batch counts are in checkpoints."""
    config = make_config({
        "model.encoders.vision": {
            "factory": "tests.support.run_processors:CountingCnn", "hidden_size": 8,
            "projector": "mlp",
        },
        "parallel": {"encoders": {"vision": {"ranks": [0]}}, "language_model": {"ranks": [0]}},
        "run.steps": 4,
    })
    assert raymm("train", config)[0] == 0
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    remove_checkpoints(tmp_path / "run", after=2)
    assert raymm("train", config)[0] == 0
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert_same_state(tmp_path / "run", tmp_path / "whole")
    assert "vision/module.norm.running_mean" in checkpoint_tensors(tmp_path / "run")
