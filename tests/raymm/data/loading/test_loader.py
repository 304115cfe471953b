"""Loading through Ray equals local loading."""

import gc
import json
import os
import re
import signal
import time
from dataclasses import replace
from itertools import islice

import pytest
import ray
import torch

from raymm.actors.faults.diagnosis import faults_kept_in
from raymm.data import StepLoader, join_parts, local_steps
from raymm.errors import DataError, FailureKind, Loss, RunFailedError, SampleError

pytestmark = pytest.mark.usefixtures("ray_cluster")


def fetch(step):
    return [
        join_parts({name: ray.get(ref) for name, ref in parts.items()})
        for parts in step.microbatches
    ]


def assert_same(step, reference):
    assert step == type(step)(
        reference.index,
        step.microbatches,
        reference.meta,
        reference.state_after,
        reference.skipped,
    )
    for got, want in zip(fetch(step), reference.microbatches, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_give_the_local_stream_in_order(make_config, workers):
    config = make_config(num_workers=workers, prefetch_steps=4)
    reference = list(local_steps(config, steps=8))
    with StepLoader(config, steps=8) as loader:
        steps = list(loader)
    assert len(steps) == 8
    assert {name for step in steps for meta in step.meta for name in meta.items} == {
        "vision",
        "audio",
    }
    for step, want in zip(steps, reference, strict=True):
        assert_same(step, want)
        assert all(isinstance(r, ray.ObjectRef) for p in step.microbatches for r in p.values())


def test_resuming_gives_the_remaining_stream(make_config):
    config = make_config()
    whole = list(local_steps(config, steps=7))
    with StepLoader(config, start_state=whole[3].state_after, steps=3) as loader:
        for step, want in zip(loader, whole[4:], strict=True):
            assert (step.state_after, step.meta) == (want.state_after, want.meta)
            torch.testing.assert_close(fetch(step), want.microbatches, rtol=0, atol=0)


def test_tensors_from_the_store_can_be_written_to(make_config):
    with StepLoader(make_config(), steps=1) as loader:
        for microbatch in fetch(next(loader)):
            microbatch["input_ids"].zero_()
            assert not microbatch["input_ids"].any()


def test_shuffled_loader_moves_only_the_named_modality(make_config):
    config = make_config()
    plain = list(local_steps(config, "heldout"))
    with StepLoader(config, "heldout", shuffled=["vision"]) as loader:
        shuffled = [(step, fetch(step)) for step in loader]
    moved = 0
    for want, (step, microbatches) in zip(plain, shuffled, strict=True):
        for got, old in zip(step.meta, want.meta, strict=True):
            # References of pairs are stored by name, and these are other samples.
            names = tuple(f"{name} with other vision" for name in old.sample_ids)
            assert got == replace(old, sample_ids=names)
        for got, old in zip(microbatches, want.microbatches, strict=True):
            assert torch.equal(got["input_ids"], old["input_ids"])
            if "audio" in old:
                torch.testing.assert_close(got["audio"], old["audio"])
            if "vision" in old:
                moved += not torch.equal(
                    got["vision"]["pixel_values"], old["vision"]["pixel_values"]
                )
    assert moved > 0
    with pytest.raises(DataError, match=r"\['video'\]"):
        StepLoader(config, shuffled=["video"])


def test_prefetch_is_bounded(make_config, tmp_path):
    config = make_config(count=60, image="logged_image", prefetch_steps=2, shuffle=False)
    per_step = [
        sum(len(meta.items.get("vision", ())) for meta in step.meta)
        for step in local_steps(config, steps=10)
    ]
    log = tmp_path / "decoded.log"
    log.unlink()
    with StepLoader(config) as loader:
        for taken in range(1, 5):
            step = next(loader)
            # The worker is idle once its queue is empty: an actor runs its calls in order.
            ray.get(step.owner.pid.remote())
            assert len(log.read_text().splitlines()) == sum(per_step[: taken + 2])


def test_a_corrupt_file_is_a_clean_error(make_config, tmp_path):
    config = make_config(shuffle=False)
    (tmp_path / "i1.png").write_bytes(b"\x89PNG broken")
    with StepLoader(config) as loader, pytest.raises(SampleError) as caught:
        next(loader)
    message = str(caught.value)
    assert "'s1'" in message and str(tmp_path / "i1.png") in message
    assert "\n" not in message and "RayTaskError" not in message


def test_skipping_is_the_same_with_workers(make_config, tmp_path):
    config = make_config(on_error="skip", num_workers=2)
    for name in ("i1.png", "i8.png", "a7.wav"):
        (tmp_path / name).write_bytes(b"broken")
    reference = list(local_steps(config, steps=5))
    with StepLoader(config, steps=5) as loader:
        for step, want in zip(loader, reference, strict=True):
            assert_same(step, want)
    assert {s.id for step in reference for s in step.skipped} == {"s1", "s7", "s8"}


def test_a_pass_continues_after_an_unusable_step(make_config, tmp_path):
    config = make_config(on_error="skip", batch_size=1, microbatches=1, shuffle=False)
    config = config.model_copy(update={"heldout": config.train})
    for name in ("i1.png", "a7.wav"):
        (tmp_path / name).write_bytes(b"broken")
    reference = list(local_steps(config, "heldout"))
    with StepLoader(config, "heldout") as loader:
        for step, want in zip(loader, reference, strict=True):
            assert_same(step, want)
    empty = [step.skipped[0].id for step in reference if not step.microbatches]
    assert empty == ["s1", "s7"] and len(reference) > 2


@pytest.mark.cells(1)
@pytest.mark.parametrize("workers", [1, 3])
def test_training_skips_steps_without_usable_samples(make_config, tmp_path, workers):
    """Skip such steps; the next step reports their samples, and a resumed run repeats them."""
    config = make_config(
        on_error="skip", batch_size=1, microbatches=1, shuffle=False, num_workers=workers,
    )
    for name in ("i1.png", "a7.wav", "i8.png"):
        (tmp_path / name).write_bytes(b"broken")
    reference = list(local_steps(config, steps=8))
    assert [[s.id for s in step.skipped] for step in reference] == [
        [], ["s1"], [], [], [], [], ["s7", "s8"], [],
    ]
    assert [step.index for step in reference] == list(range(8))
    assert all(step.microbatches for step in reference)
    with StepLoader(config, steps=8) as loader:
        for step, want in zip(loader, reference, strict=True):
            assert_same(step, want)
    with StepLoader(config, steps=3, start_state=reference[0].state_after) as loader:
        assert [step.meta for step in loader] == [step.meta for step in reference[1:4]]


def test_data_without_a_usable_sample_end_the_run(make_config, tmp_path):
    config = make_config(count=4, on_error="skip", batch_size=2, microbatches=1)
    for file in (*tmp_path.glob("i*.png"), *tmp_path.glob("a*.wav")):
        file.write_bytes(b"broken")
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    media = [line for line in lines if json.loads(line)["images"] or json.loads(line)["audio"]]
    (tmp_path / "train.jsonl").write_text("".join(f"{line}\n" for line in media))
    message = rf"none of the last {-(-len(media) // 2) * 2} samples is usable"
    with pytest.raises(DataError, match=message):
        next(local_steps(config))
    with StepLoader(config) as loader, pytest.raises(DataError, match=message):
        next(loader)


def test_a_sample_that_kills_workers_is_named_alone(make_config):
    """Load samples one by one after the second death; the first may have other reasons.

    On a busy machine, a worker that dies in step 6 may take the answer of step 5 with it.
    """
    config = make_config(image="fatal_of_one", shuffle=False)
    for error in (RunFailedError, SampleError):
        with StepLoader(config, steps_before=4) as loader, pytest.raises(error) as caught:
            list(loader)
        text = str(caught.value)
        if error is RunFailedError:
            assert re.search(
                r"died while loading step (5, samples \[0, 1,|6, samples \[6, 7, 8, 9, 10, 11\])",
                text,
            )
    assert text.startswith("sample 's8'") and "every data worker that loads this" in text
    assert isinstance(caught.value, DataError)  # the run ends, and must not be restarted


def test_a_shortage_in_a_worker_does_not_blame_samples(make_config):
    config = make_config(image="without_files", on_error="skip", num_workers=1)
    with StepLoader(config) as loader, pytest.raises(RunFailedError) as caught:
        next(loader)
    assert caught.value.kind is FailureKind.RESOURCE
    assert "failed to load step 1" in str(caught.value) and "Too many open" in str(caught.value)


def test_a_dead_worker_is_named(make_config):
    config = make_config(image="fatal", num_workers=2, shuffle=False)
    message = r"data worker 0 of 2 died while loading step 1, samples \[0, 1, 2, 3, 4, 5\]"
    with StepLoader(config) as loader, pytest.raises(RunFailedError, match=message) as caught:
        next(loader)
    assert "\n" not in str(caught.value) and caught.value.__notes__
    assert not isinstance(caught.value, DataError)  # the data are valid


def test_a_worker_that_is_stopped_is_named(make_config, tmp_path):
    with faults_kept_in(tmp_path), StepLoader(make_config(num_workers=1)) as loader:
        step = next(loader)
        loader.config = loader.config.model_copy(update={"worker_timeout": 2.0})
        pid = ray.get(step.owner.pid.remote())
        os.kill(pid, signal.SIGSTOP)
        message = (
            rf"data worker 0 of 1 \(process {pid} on .*\) did not load step \d+, samples .* of .* "
            r"within worker_timeout \(2 s\): it does not answer; it is stopped by a signal"
        )
        with pytest.raises(RunFailedError, match=message) as caught:
            for _ in loader:
                pass
    assert str(tmp_path) in str(caught.value)


def test_a_worker_stopped_in_its_first_step_is_found(
    make_config, monkeypatch
):
    """Use the address that the worker reports before it begins."""
    monkeypatch.setattr("raymm.actors.faults.inquiry.LEAST_S", 1.0)
    with StepLoader(make_config(image="stopped", worker_timeout=100)) as loader:
        message = "did not load .* in time: .*: it does not answer; it is stopped by a signal"
        start = time.monotonic()
        with pytest.raises(RunFailedError, match=message):
            next(loader)
        assert time.monotonic() - start < 60


def test_a_worker_that_cannot_start_in_time_is_named(make_config, ended_actors):
    config = make_config(worker_cpus=1000, worker_timeout=0.5, prefetch_steps=3)
    with StepLoader(config) as loader, pytest.raises(DataError, match="worker_cpus"):
        next(loader)
    assert set(ended_actors()) == {"DEAD"}  # it stops waiting for the CPUs


def test_a_lost_node_ends_the_wait_for_its_worker(make_config):
    """Check the loss of a node that Ray reports late."""
    def check():
        raise RunFailedError("node a is gone", lost=Loss.NODE)

    config, start = make_config(worker_cpus=1000, worker_timeout=100), time.monotonic()
    with StepLoader(config, check_cluster=check) as loader:
        with pytest.raises(RunFailedError, match="node a is gone"):
            next(loader)
    assert time.monotonic() - start < 30


def test_bad_configuration_is_found_before_an_actor_starts(make_config, monkeypatch):
    config = make_config()
    # A call would raise a TypeError.
    monkeypatch.setattr("raymm.data.loading.loader.start_worker", None)
    for field, value in {"train": "/nowhere.jsonl", "tokenizer": "/nowhere"}.items():
        with pytest.raises(DataError, match="nowhere"):
            StepLoader(config.model_copy(update={field: value}))
    with pytest.raises(DataError, match="does not fit"):
        StepLoader(config, start_state={"epoch": 0, "position": 999})
    with pytest.raises(DataError, match="heldout is not set"):
        StepLoader(config.model_copy(update={"heldout": None}), "heldout")


def wait_for_the_end_of(worker):
    """Wait until ``ray.kill`` takes effect; the worker may answer for a while."""
    for _ in range(600):
        try:
            ray.get(worker.pid.remote())
        except ray.exceptions.RayActorError:
            return
        time.sleep(0.05)
    pytest.fail("the data worker still answers")


def test_a_step_outlives_the_worker_that_built_it(make_config):
    config = make_config(num_workers=1)
    reference = next(local_steps(config, steps=1))
    with StepLoader(config, steps=1) as loader:
        step = next(loader)
        ray.kill(step.owner)
        wait_for_the_end_of(step.owner)
        assert_same(step, reference)


def test_steps_outlive_the_loader_and_workers_end_with_them(make_config):
    loader = StepLoader(make_config(), steps=3)
    steps = list(islice(loader, 3))
    pid = ray.get(steps[0].owner.pid.remote())
    loader.close()
    del loader
    assert fetch(steps[0])[0]["input_ids"].numel()
    del steps
    gc.collect()
    for _ in range(600):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                if "DataWorker" not in file.read():
                    return
        except OSError:
            return
        time.sleep(0.05)
    pytest.fail("the data worker still runs")
