"""``raymm check``: intact, corrupt and torn checkpoints; comparisons; pruning."""

from __future__ import annotations

import shutil

import pytest
import torch

from raymm.actors.optimizer.checkpoint_shards import checksum, write_shard
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.inspection import compare_checkpoints, inspect_checkpoints
from raymm.storage.manifest import FileEntry, Manifest, write_manifest
from raymm.storage.run_folder import RunOwner
from raymm.storage.step_folders import TORN
from tests.raymm.storage.test_manifest import checkpoint, flip_bit


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished.path, tmp_path / "run")


def stored(folder, tensors, parts=1):
    """Write a checkpoint of tensors, each split into ``parts`` along its first dimension."""
    folder.mkdir(parents=True)
    index, files = {}, {}
    for part in range(parts):
        own = {}
        for name, tensor in tensors.items():
            size = tensor.shape[0] // parts
            start, stop = part * size, (part + 1) * size
            key = name if parts == 1 else f"{name}[0:{start}:{stop}]"
            own[key] = tensor[start:stop].clone() if parts > 1 else tensor
        file = f"part-{part}.safetensors"
        write_shard(folder / file, own)
        written = checksum(folder / file)
        index |= dict.fromkeys(own, file)
        files[file] = FileEntry(size=written.size, xxh3_128=written.checksum)
    step = int(folder.name.removeprefix("step-"))
    write_manifest(folder, Manifest(
        step=step, index=index, files=files, plan={}, run={}, trainer={}
    ))
    return folder


def test_a_line_per_checkpoint(run, raymm):
    code, text = raymm("check", str(run))
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == ["whole"] * 4
    assert f"{checkpoint(run, 12)}: step 12, " in text and "tensors in" in text
    one, text = raymm("check", str(checkpoint(run, 8)))
    assert one == 0 and len(text.splitlines()) == 1


def test_check_reports_corrupt_files_and_accepts_torn_saves(run, raymm):
    torn = run / "checkpoints" / "step-00000014"
    torn.mkdir()
    (torn / TORN).touch()
    assert raymm("check", str(run))[0] == 0
    flipped = next(checkpoint(run, 10).glob("*.safetensors"))
    flip_bit(flipped, 8 * (flipped.stat().st_size - 5))
    before = sorted(path for path in run.rglob("*"))
    code, text = raymm("check", str(run))
    assert code == 1 and sorted(path for path in run.rglob("*")) == before
    words = {line.split()[1].rstrip(":"): line.split()[0] for line in text.splitlines()}
    found = [words[str(checkpoint(run, step))] for step in (6, 8, 10, 12, 14)]
    assert found == ["whole", "whole", "CORRUPT", "whole", "torn"]
    assert str(flipped) in text


def test_pruning_keeps_the_newest_intact_checkpoints(run, raymm):
    flipped = next(checkpoint(run, 12).glob("*.safetensors"))
    flip_bit(flipped, 8 * (flipped.stat().st_size - 5))
    code, text = raymm("check", str(run), "--keep", "1")
    assert code == 1 and text.count("removed") == 2
    assert [r.folder for r in inspect_checkpoints(run)] == [
        checkpoint(run, 10), checkpoint(run, 12)
    ]
    assert CheckpointStore(run).newest().folder == checkpoint(run, 10)


def test_an_active_run_is_not_pruned(run, raymm):
    with RunOwner(run):
        code, text = raymm("check", str(run), "--keep", "1")
    assert code == 2 and "belongs to an active run" in text
    assert len(list(inspect_checkpoints(run))) == 4


def test_checkpoints_of_a_run_differ_in_trained_parameters(run, raymm):
    code, text = raymm(
        "check", str(checkpoint(run, 6)), "--against", str(checkpoint(run, 12))
    )
    assert code == 1 and "0 are in the first only, 0 in the second" in text
    same, text = raymm("check", str(checkpoint(run, 6)), "--against", str(checkpoint(run, 6)))
    assert same == 0 and "0 differ" in text


def test_comparison_ignores_layouts(tmp_path):
    tensors = {"llm/a": torch.randn(4, 3), "llm/b": torch.arange(8.0)}
    whole = stored(tmp_path / "step-00000001", tensors)
    parts = stored(tmp_path / "step-00000002", tensors, parts=2)
    found = compare_checkpoints(whole, parts)
    assert found.same and found.equal == 2


def test_differences_are_relative_and_grouped_by_kind(tmp_path):
    first = {
        "llm/a": torch.tensor([3.0, 4.0]), "llm/b": torch.zeros(2), "llm/c": torch.zeros(3),
        "llm/d": torch.tensor([float("nan"), 1.0]), "llm/gone": torch.ones(1),
    }
    second = {
        "llm/a": torch.tensor([3.0, 4.5]), "llm/b": torch.ones(2), "llm/c": torch.zeros(4),
        "llm/d": torch.tensor([float("nan"), 1.0]), "llm/new": torch.ones(1),
    }
    found = compare_checkpoints(
        stored(tmp_path / "step-00000001", first), stored(tmp_path / "step-00000002", second)
    )
    assert found.only_first == ("llm/gone",) and found.only_second == ("llm/new",)
    assert found.equal == 1  # bitwise, including non-finite values
    rows = {d.name: d for d in found.different}
    assert rows["llm/a"].relative == pytest.approx(0.1)
    assert rows["llm/b"].relative == float("inf")
    assert rows["llm/c"].kinds == ("float32 (3,)", "float32 (4,)")
    assert found.different[0].name == "llm/c"
