"""Corrupt checkpoints: each is reported, and none is used."""

import json
import random
import resource
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from raymm import MultimodalModule, MultimodalParallelSpec, ParallelSpec, RankResources
from raymm.actors.optimizer.checkpoint_shards import write_shard
from raymm.actors.optimizer.stored_tensors import StoredTensors
from raymm.config.build import build_model, build_plan
from raymm.config.sections import load_config
from raymm.errors import CheckpointError, RunError, RunFileError
from raymm.files.run_files import append
from raymm.monitor.metrics import read_metrics
from raymm.scheduler.plan.plan import Plan
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.manifest import MANIFEST, Manifest, _checksum, read_manifest, write_manifest
from raymm.training.trainer import Trainer
from tests.support.tiny_run import curve

MUTATIONS = 200
EDITS = 100


def checkpoint(run, step):
    return run / "checkpoints" / f"step-{step:08d}"


def flip_bit(path, place):
    data = bytearray(path.read_bytes())
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


def resign(folder, values):
    """Write a manifest with a matching checksum."""
    values = {name: value for name, value in values.items() if name != "checksum"}
    values["checksum"] = _checksum(values)
    (folder / MANIFEST).write_text(json.dumps(values))


def test_a_run_resumes_from_the_newest_intact_checkpoint(finished, make_config, tmp_path, capsys):
    """Corrupt the newest checkpoint's shard and the previous one's manifest.

    The resumed run has the numbers of the uninterrupted one.
    """
    run = shutil.copytree(finished.path, tmp_path / "run")
    flipped = checkpoint(run, 12) / "optimizer-rank0.safetensors"
    flip_bit(flipped, 8 * (flipped.stat().st_size - 5))
    edited = checkpoint(run, 10) / MANIFEST
    edited.write_text(edited.read_text().replace('"step": 10', '"step": 11', 1))
    config = load_config(make_config())
    model = build_model(config)
    result = Trainer(
        model, build_plan(config, model), config.data, config.run,
        optimizer=config.optimizer.build(config.run.steps), resources=config.resources.for_device,
    ).fit()
    text = " ".join(capsys.readouterr().out.split())
    for file, reason in zip((flipped, edited), result.corrupt, strict=True):
        assert str(file) in reason and " ".join(reason.split()) in text
    assert f"the newest intact checkpoint is {checkpoint(run, 8)}" in text
    assert f"resuming from {checkpoint(run, 8)}" in text
    assert curve(run) == curve(finished.path)
    rows = [r for r in read_metrics(run / "metrics.jsonl") if "corrupt_checkpoints" in r]
    assert [(row["step"], len(row["corrupt_checkpoints"])) for row in rows] == [(8, 2)]
    # Nothing was deleted: new, intact checkpoints replaced both.
    for step, file in ((12, flipped), (10, edited)):
        aside = run / "checkpoints" / f"set-aside-step-{step:08d}"
        assert (aside / file.name).is_file()
    assert result.checkpoint == checkpoint(run, 12) == CheckpointStore(run).newest().folder


# Files of a checkpoint folder, without processes.


class Writer:
    """Running model with one rank and one tensor."""

    kernels = {}

    def __init__(self, plan, step=0):
        self.plan, self.steps_taken, self.group = plan, step, self

    def reloadable(self):
        return frozenset()

    def not_finite_tensors(self):
        return []

    def call(self, method, folder, frozen):
        assert method == "save"
        path = f"{folder}/model-rank0.safetensors"
        return [{"model-rank0.safetensors": write_shard(path, {"llm/x": torch.ones(9)})}]


@pytest.fixture(scope="module")
def plan(finished):
    return Plan.from_dict(read_manifest(CheckpointStore(finished.path).latest()).plan)


def names(store):
    return [folder.name.removeprefix("step-0000000") for folder in store.committed()]


def test_the_last_good_checkpoint_is_never_deleted(plan, tmp_path):
    """Keep one checkpoint; the newest is corrupt, and the run resumed from the previous one."""
    store = CheckpointStore(tmp_path, keep=1)
    for step in (2, 4):
        store.save(Writer(plan, step), {})
    assert names(store) == ["4"]
    store = CheckpointStore(tmp_path, keep=2)
    store.save(Writer(plan, 6), {})
    flip_bit(checkpoint(tmp_path, 6) / "model-rank0.safetensors", 700)
    store = CheckpointStore(tmp_path, keep=1)
    assert store.newest().folder == checkpoint(tmp_path, 4)
    store.save(Writer(plan, 5), {})
    assert names(store) == ["5", "6"] and store.newest().folder == checkpoint(tmp_path, 5)
    store.save(Writer(plan, 6), {})
    assert names(store) == ["6"] and store.newest().corrupt == ()
    store.save(Writer(plan, 7), {})
    assert names(store) == ["7"]
    assert (tmp_path / "checkpoints" / "set-aside-step-00000006").is_dir()


def test_files_of_another_run_are_not_removed(plan, tmp_path):
    """Give the folder to another run while the shards are written: it may be saving there."""
    def refuse():
        if any(checkpoint(tmp_path, 4).glob("*.safetensors")):
            raise RunError("another's")

    store = CheckpointStore(tmp_path, check_owner=refuse)
    store.save(Writer(plan, 2), {})
    with pytest.raises(RunError, match="another's"):
        store.save(Writer(plan, 4), {})
    assert any(checkpoint(tmp_path, 4).glob("*.safetensors")) and names(store) == ["2"]


def test_only_leftovers_of_torn_saves_are_removed(plan, tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (2, 4):
        store.save(Writer(plan, step), {})
    shutil.copytree(checkpoint(tmp_path, 4), torn := checkpoint(tmp_path, 6))
    (torn / MANIFEST).rename(torn / f".{MANIFEST}.raymm-partial")
    (torn / ".not-committed.raymm-partial").touch()
    (empty := checkpoint(tmp_path, 8)).mkdir()
    (late := checkpoint(tmp_path, 4) / ".not-committed.raymm-partial").touch()
    (lost := checkpoint(tmp_path, 2) / MANIFEST).unlink()
    (own := tmp_path / "checkpoints" / "notes").mkdir()
    removed = store.remove_leftovers()
    assert [str(one) in text for one, text in zip((late, torn, empty), removed, strict=True)]
    assert not torn.exists() and not empty.exists() and not late.exists()
    assert own.exists() and lost.parent.exists()
    newest = store.newest()
    assert newest.folder == checkpoint(tmp_path, 4) and newest.corrupt == ()
    shutil.rmtree(newest.folder)
    with pytest.raises(CheckpointError, match="no checkpoint is intact:\n.*02 has no manifest"):
        store.newest()


def test_checkpoints_on_a_missing_disk_are_an_error(tmp_path):
    """Raise an error: a new run would overwrite the metrics."""
    root = tmp_path / "checkpoints"
    root.symlink_to(tmp_path / "disk")
    with pytest.raises(CheckpointError, match=f"checkpoint folder {root}: No such file"):
        CheckpointStore(tmp_path).newest()
    root.unlink()
    root.write_text("")
    with pytest.raises(CheckpointError, match=f"checkpoint folder {root}: Not a directory"):
        CheckpointStore(tmp_path).newest()


def test_an_invalid_log_is_rejected_before_ranks_start(
    finished, raymm, make_config, tmp_path, no_new_actors
):
    run = finished.copy_until(tmp_path / "run", 10)
    log = run / "metrics.jsonl"
    log.write_text(log.read_text().replace('"step": 3', '"step": "3"', 1))
    (exporting := run / ".out.raymm-partial").mkdir()
    before = log.read_text()
    code, text = raymm("train", make_config({"run.steps": 14, "optimizer.total_steps": 14}))
    assert code == 2 and f"{log}, line " in text and "not a row that raymm wrote" in text
    assert log.read_text() == before and exporting.is_dir()


def test_a_full_disk_is_reported_and_old_checkpoints_are_kept(ray_cluster, tmp_path):
    """Limit the rank to files of 10 kB."""
    values = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2)
    model = MultimodalModule({}, LlamaConfig(vocab_size=64, num_hidden_layers=1, **values))
    spec = MultimodalParallelSpec({}, ParallelSpec(), 1)
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long)}
    batch["labels"] = batch["input_ids"]
    store = CheckpointStore(tmp_path)
    with spec.apply(model, resources=RankResources(cpus=0.5)) as parallel:
        parallel.train_step(batch)
        store.save(parallel, {})
        parallel.train_step(batch)
        (rank,) = parallel.group.pids()
        resource.prlimit(rank["pid"], resource.RLIMIT_FSIZE, (10_000, 10_000))
        with pytest.raises(RunFileError) as error:
            store.save(parallel, {})
    shard = checkpoint(tmp_path, 2) / "model-rank0.safetensors"
    assert f"step 2 could not be saved: cannot write {shard}: " in str(error.value)
    assert "File too large" in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith(f"{checkpoint(tmp_path, 1)} is kept")
    assert store.newest().manifest.step == 1 and not checkpoint(tmp_path, 2).exists()


def test_a_log_on_a_full_disk_is_reported():
    with pytest.raises(RunFileError, match="cannot write /dev/full: No space left on device"):
        append(Path("/dev/full"), "x")


# Mutations.


def loaded(run):
    """Return everything that is loaded from a run's newest checkpoint."""
    found = CheckpointStore(run).newest()
    manifest = found.manifest
    stored = StoredTensors(found.folder, manifest.index, manifest.shards)
    tensors = stored.read(dict.fromkeys(stored._stored))
    return manifest.step, manifest.trainer, manifest.plan, manifest.run, tensors


def same(mine, other):
    return mine[:4] == other[:4] and mine[4].keys() == other[4].keys() and all(
        torch.equal(mine[4][name], other[4][name]) for name in mine[4]
    )


def mutate(run, other, draw):
    """Change something in a run's only checkpoint; return a description.

    Args:
        other: checkpoint of another step.
    """
    folder = CheckpointStore(run).latest()
    files = sorted(folder.iterdir())
    file = draw.choice(files)
    data = file.read_bytes()
    another = draw.choice([one for one in files if one != file])

    def flip():
        flip_bit(file, draw.randrange(8 * len(data)))

    def zero():
        start = draw.randrange(len(data))
        end = min(start + 4096, len(data))
        file.write_bytes(data[:start] + bytes(end - start) + data[end:])

    def noise():
        start = draw.randrange(len(data))
        file.write_bytes(data[:start] + draw.randbytes(draw.randrange(1, 9)) + data[start:])

    def truncate():
        file.write_bytes(data[: draw.choice([0, 7, 8, len(data) - 1, draw.randrange(len(data))])])

    def swap():
        theirs = another.read_bytes()
        another.write_bytes(data)
        file.write_bytes(theirs)

    def of_another_step():
        shutil.copy(other / file.name, file)

    def delete():
        file.unlink()

    def duplicate():
        shutil.copy(file, draw.choice([another, folder / f"copy-of-{file.name}"]))

    def duplicate_folder():
        shutil.copytree(folder, checkpoint(run, draw.randrange(1, 30)), dirs_exist_ok=True)

    def rename_folder():
        folder.rename(checkpoint(run, draw.randrange(13, 30)))

    def edit():
        values = json.loads((folder / MANIFEST).read_text())
        edit_value(values, draw)
        (folder / MANIFEST).write_text(json.dumps(values))

    kind = draw.choice([
        flip, zero, noise, truncate, swap, of_another_step, delete, duplicate, duplicate_folder,
        rename_folder, edit,
    ])
    kind()
    return f"{kind.__name__} of {file.name}"


def edit_value(values, draw):
    """Change, delete or add a value at a random path of a manifest."""
    holder = values
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = draw.choice(keys)
        if isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.8:
            holder = holder[key]
            continue
        break
    kind = draw.choice(["value", "value", "delete", "add"])
    new = draw.choice([
        None, True, -1, 10**30, 1.5, float("nan"), "", "../x.safetensors", "/etc/passwd", "\ud800",
        [], {}, [[]], {"x": {}}, "model-rank0.safetensors", "a" * 32,
    ])
    if kind == "delete":
        del holder[key]
    elif kind == "add" and isinstance(holder, dict):
        holder["added"] = new
    else:
        holder[key] = new


def test_every_effective_mutation_is_reported(finished, tmp_path):
    """Check that each mutation is rejected by name, or loads the same tensors, step and position.

    Mutations flip, truncate, swap, delete, duplicate or edit files.
    """
    run = finished.copy_until(tmp_path / "run", 12)
    expected = loaded(run)
    other = checkpoint(finished.path, 10)
    kept, draw = run / "checkpoints", random.Random(14)
    refused = 0
    for number in range(MUTATIONS):
        mutated = tmp_path / str(number)
        shutil.copytree(kept, mutated / "checkpoints")
        what = mutate(mutated, other, draw)
        try:
            found = loaded(mutated)
        except CheckpointError as error:
            refused += 1
            assert str(mutated / "checkpoints" / "step-") in str(error), what
        else:
            assert same(found, expected), what
        shutil.rmtree(mutated)
    assert refused > MUTATIONS / 2  # most of them matter


def test_edits_with_a_valid_checksum_are_rejected_or_read(finished, tmp_path):
    """Check that edits with a valid checksum are read, or rejected with the path."""
    run = finished.copy_until(tmp_path / "run", 12)
    folder, draw = checkpoint(run, 12), random.Random(14)
    whole = json.loads((folder / MANIFEST).read_text())
    refused = 0
    for _ in range(EDITS):
        values = deepcopy(whole)
        edit_value(values, draw)
        resign(folder, values)
        try:
            loaded(run)
        except CheckpointError as error:
            refused += 1
            assert str(folder) in str(error)
    assert refused > EDITS / 3
    for name in ("../step-00000010/model-rank0.safetensors", "/etc/passwd", "a/b.safetensors", ""):
        values = deepcopy(whole)
        values["files"][name] = values["files"].pop("model-rank0.safetensors")
        resign(folder, values)
        with pytest.raises(CheckpointError, match="accepted: NAME.safetensors, without folder"):
            loaded(run)


@pytest.mark.parametrize(("text", "reason"), [
    (b"\xff\xfe{}", "codec can't decode"),
    (b"[" * 100_000, "recursion"),
    (b"[1, 2]", "is not a JSON object"),
    (b'{"format": 2, "step": 1, "step": 2}', "'step' more than once"),
    (b'{"format": 1, "step": 1}', "format is 1; this raymm reads 2"),
    (b'{"format": true}', "format is True"),
    (b"", "Expecting value"),
    (b'{"format": 2, "x": ' + b"1" * 5000 + b"}", "digits"),
])  # fmt: skip
def test_an_invalid_manifest_is_named(tmp_path, text, reason):
    (tmp_path / MANIFEST).write_bytes(text)
    with pytest.raises(CheckpointError, match=reason) as error:
        read_manifest(tmp_path)
    assert str(tmp_path / MANIFEST) in str(error.value)


def test_types_and_fields_of_a_manifest_are_checked(tmp_path):
    write_manifest(tmp_path, Manifest(step=1, index={}, files={}, plan={}, run={}, trainer={}))
    good = json.loads((tmp_path / MANIFEST).read_text())
    assert read_manifest(tmp_path).step == 1
    for name, wrong in (
        ("step", "1"), ("step", 1.0), ("step", -1), ("step", True), ("index", []),
        ("index", {"x": 1}), ("index", {"x": "y"}), ("files", {"a.safetensors": 7}),
        ("files", {"a.safetensors": {"size": 1, "xxh3_128": "F" * 32}}), ("plan", None),
        ("trainer", "x"), ("more", 1),
    ):  # fmt: skip
        resign(tmp_path, {**good, name: wrong})
        with pytest.raises(CheckpointError, match=f"is damaged: .*{name}"):
            read_manifest(tmp_path)
