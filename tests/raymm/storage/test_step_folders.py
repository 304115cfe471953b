"""Checkpoints that real ranks write in the background of their steps."""

import os
import resource
import signal
import time

import pytest
import torch
from transformers import LlamaConfig

from raymm import MultimodalModule, MultimodalParallelSpec, ParallelSpec, RankResources
from raymm.errors import RankFailedError, RunFileError
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.inspection import compare_checkpoints


def checkpoint(run, step):
    return run / "checkpoints" / f"step-{step:08d}"


def test_a_full_disk_is_reported_and_the_run_continues(
    ray_cluster, tmp_path
):
    """Limit the rank to files of 10 kB; after the limit is lifted, the next save is intact."""
    values = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2)
    model = MultimodalModule({}, LlamaConfig(vocab_size=64, num_hidden_layers=1, **values))
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long)}
    batch["labels"] = batch["input_ids"]
    store, at_once = CheckpointStore(tmp_path), CheckpointStore(tmp_path / "at once")
    spec = MultimodalParallelSpec({}, ParallelSpec(), 1)
    with spec.apply(model, resources=RankResources(cpus=0.5)) as parallel:
        parallel.train_step(batch)
        store.start(parallel, {})
        (rank,) = parallel.group.pids()
        assert store.finish().step == 1
        resource.prlimit(rank["pid"], resource.RLIMIT_FSIZE, (10_000, -1))
        parallel.train_step(batch)
        store.start(parallel, {})
        parallel.train_step(batch)
        shard = checkpoint(tmp_path, 2) / "model-rank0.safetensors"
        with pytest.raises(RunFileError, match=f"step 2 could not be saved: cannot write {shard}"):
            store.finish()
        assert store.newest().manifest.step == 1 and not checkpoint(tmp_path, 2).exists()
        resource.prlimit(rank["pid"], resource.RLIMIT_FSIZE, (-1, -1))
        parallel.train_step(batch)
        store.start(parallel, {})
        state = at_once.save(parallel, {})
        for _ in range(3):
            parallel.train_step(batch)
        saved = store.finish()
    assert saved.step == 4 and store.newest().folder == saved.folder
    assert compare_checkpoints(str(saved.folder), str(state)).same


@pytest.mark.cells(2)
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.03, 0.1])
def test_a_rank_killed_during_a_save_leaves_an_intact_checkpoint(
    ray_cluster, tmp_path, seconds
):
    values = dict(hidden_size=256, intermediate_size=512, num_attention_heads=2)
    model = MultimodalModule({}, LlamaConfig(vocab_size=4096, num_hidden_layers=2, **values))
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long)}
    batch["labels"] = batch["input_ids"]
    store = CheckpointStore(tmp_path, keep=1)
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=2), 1)
    with spec.apply(model, resources=RankResources(cpus=0.5)) as parallel:
        parallel.train_step(batch)
        store.save(parallel, {})
        parallel.train_step(batch)
        store.start(parallel, {})
        time.sleep(seconds)
        os.kill(parallel.group.pids()[1]["pid"], signal.SIGKILL)
        try:
            newest = store.finish().step
        except RankFailedError:
            newest = 1
        with pytest.raises(RankFailedError, match="rank 1 .* died"):
            parallel.train_step(batch)
    found = CheckpointStore(tmp_path).newest()
    assert found.manifest.step == newest and found.corrupt == ()
