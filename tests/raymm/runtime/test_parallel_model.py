"""Renewed rendezvous after a failure: steps continue bit for bit in the remaining processes."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import ray
import torch
import transformers as hf
from torch import nn

from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.placement.placement import PlacementOptions
from raymm.actors.rank.rank_group import RankGroup
from raymm.actors.rank.rank_resources import RankResources
from raymm.actors.recovery.snapshots import Snapshots
from raymm.errors import RankFailedError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec

# A number of seconds that means an error.
ERROR = 12345
# Long enough for a kill; other sleeping ranks have to wake up to continue.
LONG_S = 2
LAYOUTS = {
    "pipeline": ({"vision": ParallelSpec()}, ParallelSpec(pp=2)),
    "shared rank": ({"vision": ParallelSpec(ranks=(0,))}, ParallelSpec(ranks=(0,))),
    "tensors and tokens": ({}, ParallelSpec(tp=2, cp=2)),
    "replicas": ({"vision": ParallelSpec(dp=2)}, ParallelSpec(dp=2, sharding="zero1")),
    "fsdp": ({}, ParallelSpec(dp=2, sharding="fsdp")),
}


class Encoder(nn.Module):
    """Encoder (n, 3) -> (n, 2, 4) with running statistics.

    It sleeps for the seconds of its input, or raises.
    """

    hidden_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(3, 8), nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, sleep=None):
        seconds = 0 if sleep is None else int(sleep.max())
        if seconds == ERROR:
            raise MemoryError("no memory for this batch")
        time.sleep(seconds)
        return self.dropout(self.norm(self.stem(x))).view(-1, 2, 4)


def model_of() -> MultimodalModule:
    torch.manual_seed(0)
    llm = hf.LlamaForCausalLM(hf.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=16,
    ))
    vision = ModalityModule(Encoder(), "linear", example_inputs={"x": torch.zeros(2, 3)})
    return MultimodalModule({"vision": vision}, ModalityModule(llm))


def batch(step: int, sleep: int = 0) -> list[dict]:
    """Return two microbatches."""
    draw = torch.Generator().manual_seed(step)
    ids = [torch.randint(16, (4, 5), generator=draw) for _ in range(2)]
    return [
        {
            "input_ids": one, "labels": one.clone(),
            "vision": {"x": torch.randn(4, 3, generator=draw), "sleep": torch.full((4,), sleep)},
        }
        for one in ids
    ]


@pytest.fixture
def start(ray_cluster):
    """Return a function that starts the model under a layout; stop the model afterwards."""
    running = []

    def started(layout: str, spares: int = 0):
        vision, llm = LAYOUTS[layout]
        parallel = MultimodalParallelSpec(vision, llm, 2).apply(
            model_of(), optimizer=OptimizerConfig(lr=0.1), timeout_s=60,
            resources=RankResources(cpus=0.5), placement=PlacementOptions(spares=spares),
        )
        running.append(parallel)
        return parallel

    yield started
    for parallel in running:
        parallel.shutdown()


@pytest.mark.parametrize("at", ["_create", "_describe", "call"])
def test_an_interrupted_start_leaves_no_actors(start, ray_cluster, monkeypatch, at):
    """Interrupt while ranks are created, while they start, and after they have started."""
    import ray._private.state

    def living() -> set[str]:
        actors = ray._private.state.actors()
        return {name for name, actor in actors.items() if actor["State"] != "DEAD"}

    before, created = living(), []
    original = getattr(RankGroup, at)

    def interrupted(group, *arguments, **options):
        created.append(len(living() - before))
        if at == "call" and "not_finite_tensors" not in arguments:
            return original(group, *arguments, **options)
        if at == "_create" and not group._actors:
            return original(group, *arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(RankGroup, at, interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:  # holds the frames, as a notebook does
        start("pipeline")
    assert created[-1] > 0 and caught.traceback
    end = time.monotonic() + 30
    while living() - before:
        assert time.monotonic() < end, "actors are left"
        time.sleep(0.1)


def losses(parallel, steps) -> list[float]:
    return [parallel.train_step(batch(step)).loss for step in steps]


def pids(parallel) -> list[int]:
    return [rank["pid"] for rank in parallel.group.pids()]


@pytest.mark.cells(1)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replacing_a_killed_rank_changes_no_loss(start, layout):
    """Kill it in the middle of a step; the snapshot is two steps old."""
    with start(layout) as undisturbed:
        whole = losses(undisturbed, range(6))
    parallel = start(layout)
    parallel.group.keeps_survivors = True
    snapshots = Snapshots(parallel.group)
    assert losses(parallel, [0, 1]) == whole[:2]
    snapshots.take(2)
    assert losses(parallel, [2, 3]) == whole[2:4]
    before = pids(parallel)
    pending = parallel.submit(parallel.prepare(batch(4, LONG_S)), update=True)
    time.sleep(0.5)
    os.kill(before[0], signal.SIGKILL)
    with pytest.raises(RankFailedError, match="rank 0 .* died"):
        pending.result()
    assert parallel.renew() is None
    assert snapshots.restore().step == 2
    parallel.restore_step(2)
    after = pids(parallel)
    assert after[1:] == before[1:] and after[0] != before[0]
    assert losses(parallel, range(2, 6)) == whole[2:]


@pytest.mark.cells(1)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_exception_of_a_stage_ends_only_the_step(start, layout):
    parallel = start(layout)
    first = losses(parallel, [0])
    before = pids(parallel)
    parallel.execute(batch(7))  # its gradients are dropped with those of the next one
    with pytest.raises(RankFailedError, match="no memory for this batch"):
        parallel.execute(batch(1, ERROR))
    rest = losses(parallel, [1, 2])
    assert pids(parallel) == before
    parallel.shutdown()
    assert first + rest == losses(start(layout), range(3))


@pytest.mark.cells(1)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", ["pipeline", "tensors and tokens", "fsdp"])
def test_a_spare_replaces_a_lost_rank_and_is_replaced(start, layout):
    """Lose two ranks; the second one is replaced by the successor of the first spare."""
    with start(layout) as undisturbed:
        whole = losses(undisturbed, range(5))
    parallel = start(layout, spares=1)
    parallel.group.keeps_survivors = True
    snapshots = Snapshots(parallel.group)
    assert losses(parallel, [0, 1]) == whole[:2]
    for step in (2, 3):
        snapshots.take(step)
        waiting = _warm_spare(parallel)
        before = pids(parallel)
        os.kill(before[0], signal.SIGKILL)
        with pytest.raises(RankFailedError, match="rank 0 .* died"):
            losses(parallel, [step])
        parallel.renew()
        parallel.restore_step(snapshots.restore().step)
        assert pids(parallel) == [waiting, *before[1:]]
        assert losses(parallel, [step]) == whole[step : step + 1]
    spare = _warm_spare(parallel)
    os.kill(spare, signal.SIGKILL)  # without any effect
    assert losses(parallel, [4]) == whole[4:]
    os.kill(pids(parallel)[0], signal.SIGKILL)
    with pytest.raises(RankFailedError, match="rank 0 .* died"):
        losses(parallel, [5])
    parallel.renew()  # with a new process
    parallel.shutdown()


def _warm_spare(parallel) -> int:
    """Return the process id of a ready spare."""
    (spare,) = parallel.group._spares._waiting
    ray.get(spare.warm, timeout=60)
    place: Any = ray.get(spare.actor.describe.remote())
    return place["pid"]


@pytest.mark.timeout(180)
def test_a_hanging_rank_is_found_by_earlier_durations(start):
    """Detect it long before the timeout of a wait; waiting ranks stay."""
    with start("pipeline") as undisturbed:
        whole = losses(undisturbed, range(4))
    parallel = start("pipeline")
    parallel.group.keeps_survivors = True
    snapshots = Snapshots(parallel.group)
    assert losses(parallel, [0, 1]) == whole[:2]
    snapshots.take(2)
    before = pids(parallel)
    said = r"^rank 0 .* has been in forward vision.*\n.* takes too long"
    with pytest.raises(RankFailedError, match=said):
        parallel.submit(parallel.prepare(batch(2, 600)), update=True).result()
    parallel.renew()
    parallel.restore_step(snapshots.restore().step)
    after = pids(parallel)
    assert after[1:] == before[1:] and after[0] != before[0]
    assert losses(parallel, [2, 3]) == whole[2:]


@pytest.mark.timeout(180)
def test_a_rank_that_is_stopped_for_a_while_survives(start):
    parallel = start("pipeline")
    first = losses(parallel, [0])
    before = pids(parallel)
    os.kill(before[1], signal.SIGSTOP)
    threading.Timer(6.0, os.kill, (before[1], signal.SIGCONT)).start()
    rest = losses(parallel, [1, 2])
    assert pids(parallel) == before
    parallel.shutdown()
    assert first + rest == losses(start("pipeline"), range(3))
