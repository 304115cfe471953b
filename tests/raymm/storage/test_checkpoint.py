"""The best checkpoint survives until a better one is committed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raymm.callbacks.callback import Callback, SavedCheckpoint
from raymm.callbacks.handler import CallbackHandler
from raymm.config.sections import EvaluateSection
from raymm.errors import CheckpointError, NotFiniteError, RankFailedError, RunFileError
from raymm.evaluation.best_evaluation import BestEvaluation
from raymm.storage import checkpoint, loading
from raymm.storage.checkpoint import CheckpointStore, call_ranks_behind
from raymm.storage.step_folders import step_number
from raymm.training import training_loop
from raymm.training.training_loop import RunCheckpoints
from tests.support import SUPPORT
from tests.support.killed_saves import Running, newest_step, write_copies

KILLS = 5


class Told(Callback):
    """Callback that collects the steps of the checkpoints that it is called for."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        self.steps.append(checkpoint.step)


def handler(*callbacks: Callback) -> CallbackHandler:
    return CallbackHandler(callbacks, Path("."), print)


@pytest.fixture
def ranks(monkeypatch):
    """Return ranks that write when the test permits it."""
    may_write = threading.Event()

    def write(group: Running, method: str, folder: str) -> list:
        assert may_write.wait(60)
        return write_copies(group, method, folder)

    monkeypatch.setattr(checkpoint, "call_ranks_behind", write)
    yield may_write
    may_write.set()


def test_a_killed_save_leaves_an_intact_checkpoint(tmp_path):
    """Kill before every file operation, and at random moments."""
    script = SUPPORT / "killed_saves.py"
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run"), str(KILLS)],
        capture_output=True, text=True, timeout=300, check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    result = json.loads(ended.stdout.splitlines()[-1])
    steps = result["at_operations"]
    committed = steps.index(2)  # from there on it is the new one
    assert len(steps) > 15 and steps == [1] * committed + [2] * (len(steps) - committed)
    assert committed > 8 and len(steps) - committed > 4
    for status, step in result["at_moments"]:
        assert status in (0, -signal.SIGKILL) and step in ((2,) if status == 0 else (1, 2))


def test_steps_continue_while_the_copy_is_saved(ranks, tmp_path):
    store = CheckpointStore(tmp_path)
    running = Running(1)
    store.start(running, {"data": 1})
    assert store.under_way == 1 and store.ended() is None and store.latest() is None
    for tensor in running.tensors:
        tensor.fill_(7.0)
    ranks.set()
    saved = store.finish()
    assert saved is not None and saved.step == 1 and saved.folder == store.current
    assert store.under_way is None and store.finish() is None
    assert newest_step(tmp_path) == 1


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_second_save_waits_and_reports_it(
    ranks, tmp_path, asynchronous
):
    """Block a save of either kind until the current one is written."""
    said, told = [], Told()

    class Ranks(Running):
        def not_finite_tensors(self):
            return []

        def call(self, method, *args):
            if method == "copy_state":
                return super().call(method, *args)
            super().call("copy_state", frozenset())
            return [part.shards for part in write_copies(self, "write_copy", args[0])]

    def say(line):
        said.append(line)
        assert (store.under_way, told.steps) in ((1, []), (2, [1]))
        ranks.set()

    store, running = CheckpointStore(tmp_path), Ranks(1)
    checkpoints = RunCheckpoints(store, running, handler(told), say, True)
    checkpoints.take(1)
    running.steps_taken = 2
    running.tensors = Running(2).tensors
    assert not checkpoints.look() and checkpoints.saved == 1  # as at the start of the run
    (checkpoints.take if asynchronous else checkpoints.take_now)(2)
    checkpoints.finish()
    assert said[0] == "waiting for the checkpoint of step 1, which is still being written"
    assert told.steps == [1, 2] and checkpoints.saved == 2 and checkpoints.look()
    assert not checkpoints.look() and newest_step(tmp_path) == 2


def test_chosen_kernels_are_stored_and_restored(ranks, tmp_path, monkeypatch):
    """Save a choice of kernels in the background, change it, and resume."""
    ranks.set()
    store, running = CheckpointStore(tmp_path), Running(1)
    running.kernels = {"class": "sdpa"}
    store.start(running, {})
    running.kernels = {"class": "sdpa", "later": "flex"}
    store.finish()
    resumed = Mock()
    resumed.not_finite_tensors.return_value = []
    monkeypatch.setattr(loading, "call_ranks", lambda *_: [])
    monkeypatch.setattr(loading, "_check_both_ways", lambda *_: None)
    loading.restore(resumed, store.latest())
    resumed.restore_kernels.assert_called_once_with({"class": "sdpa"})
    resumed.restore_step.assert_called_once_with(1)


def test_a_failed_write_is_reported_and_loses_nothing(
    ranks, tmp_path, monkeypatch
):
    ranks.set()
    store = CheckpointStore(tmp_path)
    store.start(Running(1), {"data": 1})
    store.finish()

    def full(group, method, folder):
        write_copies(group, method, folder)
        raise CheckpointError(
            f"cannot write {folder}/model-rank1.safetensors: No space left on device"
        )

    monkeypatch.setattr(checkpoint, "call_ranks_behind", full)
    store.start(Running(2), {"data": 2})
    with pytest.raises(RunFileError, match="step 2 could not be saved: cannot write .*step-00000002"
                       "/model-rank1.safetensors: No space left on device; .*00000001 is kept"):
        store.finish()
    assert store.remove_leftovers() == []
    assert store.finish() is None and newest_step(tmp_path) == 1


def test_the_third_failed_save_in_a_row_ends_the_run(ranks, tmp_path, monkeypatch):
    """Check that a successful save in between resets the count, and that a short shortage is
    survived even if the run saves often."""
    ranks.set()
    monkeypatch.setattr(training_loop, "SHORTAGE_S", 0.0)
    said, told = [], Told()

    def write(group, method, folder):
        parts = write_copies(group, method, folder)
        if group.steps_taken not in (3, 13):
            raise CheckpointError(f"cannot write {folder}/model-rank1.safetensors: No space left")
        return parts

    monkeypatch.setattr(checkpoint, "call_ranks_behind", write)
    store, running = CheckpointStore(tmp_path), Running(1)
    checkpoints = RunCheckpoints(store, running, handler(told), said.append, True)

    def save(step):
        running.steps_taken = step
        checkpoints.take(step)
        checkpoints.finish()

    for step in range(1, 6):
        save(step)
    with pytest.raises(RunFileError, match="step 6 could not .*No space left; .*03 is kept"):
        save(6)
    assert told.steps == [3] and checkpoints.saved == 3 and len(store.committed()) == 1
    lines = [line for line in said if "could not be saved" in line]
    assert len(lines) == 4 and all("The run continues and saves at" in line for line in lines)
    monkeypatch.setattr(training_loop, "SHORTAGE_S", 60.0)
    for step in range(7, 14):
        save(step)
    assert told.steps == [3, 13]


def test_a_save_counts_if_an_old_checkpoint_cannot_be_removed(
    ranks, tmp_path, monkeypatch
):
    """Check that the run continues, and that a later save removes all leftovers."""
    ranks.set()
    said, told, disk_is_full = [], Told(), [True]

    def drop(folder, before=checkpoint.drop):
        if disk_is_full:
            raise RunFileError(f"cannot write {folder.place}: No space left on device")
        before(folder)

    monkeypatch.setattr(checkpoint, "drop", drop)
    store, running = CheckpointStore(tmp_path, keep=1), Running(1)
    checkpoints = RunCheckpoints(store, running, handler(told), said.append, True)
    for step in range(1, 7):
        if step == 6:
            disk_is_full.clear()
        running.steps_taken = step
        checkpoints.take(step)
        checkpoints.finish()
        assert len(store.committed()) == (1 if step == 6 else step)
    assert told.steps == [1, 2, 3, 4, 5, 6] and checkpoints.saved == 6 and store.unremoved is None
    lines = [line for line in said if "could not be removed: cannot write " in line]
    assert len(lines) == 4 and "step-00000001" in lines[-1] and "No space left" in lines[-1]


def test_non_finite_tensors_are_not_committed(ranks, tmp_path):
    ranks.set()
    store, running = CheckpointStore(tmp_path), Running(1)
    running.tensors[1][3] = torch.nan
    store.start(running, {})
    with pytest.raises(NotFiniteError, match=r"these tensors are not finite: llm/x1 \(1 of"):
        store.finish()
    assert store.committed() == [] and store.remove_leftovers() == []


def test_an_abandoned_save_is_not_committed(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr("raymm.storage.checkpoint.GIVE_UP_S", 0.01)
    store = CheckpointStore(tmp_path)
    store.start(Running(1), {})
    behind = store._behind
    store.abandon()
    assert store.finish() is None
    ranks.set()
    behind._thread.join(60)
    assert store.committed() == [] and len(store.remove_leftovers()) == 1


def test_the_group_reports_lost_ranks(tmp_path, monkeypatch):
    """Check that the group diagnoses the loss, not the writing thread."""
    class Lost(Running):
        def pids(self):
            raise RankFailedError("rank 1 died: killed")

    def lost(group, method, folder):
        raise RankFailedError("The actor died")

    monkeypatch.setattr(checkpoint, "call_ranks_behind", lost)
    checkpoints = RunCheckpoints(
        CheckpointStore(tmp_path), Lost(1), handler(), print, True
    )
    checkpoints.take(1)
    with pytest.raises(RankFailedError, match="rank 1 died: killed"):
        checkpoints.finish()
    assert CheckpointStore(tmp_path).newest() is None


class Group:
    """Group of ranks whose calls are tasks."""

    def __init__(self, ray, errors):
        self.ray, self.errors = ray, errors

    def start(self, method, *args):
        @self.ray.remote(num_cpus=0)
        def write(error):
            if error is not None:
                raise error
            return "written"

        return [write.remote(error) for error in self.errors]

    def check_running(self):
        pass


@pytest.mark.parametrize(("error", "kind", "message"), [
    (CheckpointError("cannot write x: full"), CheckpointError, "^cannot write x: full$"),
    (MemoryError("of 7 bytes"), CheckpointError, "^rank 1 has no memory to write its shard$"),
    (KeyError("x"), RankFailedError, "KeyError"),
])  # fmt: skip
def test_a_rank_that_cannot_write_is_not_lost(ray_cluster, error, kind, message):
    """Distinguish a missing checkpoint, after which the run continues, from a lost rank."""
    assert call_ranks_behind(Group(ray_cluster, [None, None]), "write") == ["written"] * 2
    with pytest.raises(kind, match=message):
        call_ranks_behind(Group(ray_cluster, [None, error]), "write")


def committed(store: CheckpointStore) -> list[int]:
    return [step_number(folder.name) for folder in store.committed()]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=5))
@example([(4, True), (1, True), (2, True)])
@example([(1, True), (0, True), (4, False), (2, True)])
@example([(1, True), (0, True), (4, True), (2, True)])
def test_the_best_checkpoint_always_exists(tmp_path_factory, steps) -> None:
    """Evaluate and save every step; some saves fail, as on a full disk.

    During and after a save, the best of the committed evaluations has a checkpoint.
    """
    root = tmp_path_factory.mktemp("run")
    best = BestEvaluation(EvaluateSection(every=1, metrics=["anls"], best="anls"), root)
    rows = [{"step": 0, "heldout_anls": 9.0, "texts": 1}]
    store, saved = CheckpointStore(root, 1), []
    store.keep_best(lambda steps: best.write(rows, steps))

    def write(group, method, folder):
        assert committed(store) == expected()
        if not group.succeeds:
            raise CheckpointError(f"cannot write {folder}/model-rank0.safetensors: No space left")
        return write_copies(group, method, folder)

    def expected() -> list[int]:
        values = {step: steps[step - 1][0] for step in saved}
        return sorted({*saved[-1:], max(values, key=values.__getitem__, default=0)} - {0})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint, "call_ranks_behind", write)
        for step, (value, succeeds) in enumerate(steps, start=1):
            rows.append({"step": step, "heldout_anls": float(value), "texts": 1})
            running = Running(step, size=1)
            running.succeeds = succeeds
            store.start(running, {})
            try:
                store.finish()
                saved.append(step)
            except RunFileError:
                assert not succeeds
            assert committed(store) == expected()
