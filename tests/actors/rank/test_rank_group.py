"""Ranks as Ray actors: capacity, executed timelines, a killed rank."""


import ctypes
import os
import re
import signal
import tempfile
import time
from importlib import import_module
from pathlib import Path

import pytest
import ray
import torch
import transformers as hf
from torch import nn

from raymm.actors.faults.diagnosis import faults_kept_in
from raymm.actors.rank.rank_group import RankGroup, Spares
from raymm.actors.rank.rank_resources import RankResources
from raymm.actors.rank.rank_spec import RankSpec
from raymm.errors import ClusterError, RankFailedError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.plan.stage import NO_STAGE, StageId
from raymm.scheduler.program.program import Op

PATIENCE_S = 60


class Waits:
    """Fake of a rank's actor."""

    def where(self):
        return None

    def pid(self):
        return os.getpid()


def test_a_dead_spare_is_replaced(ray_cluster):
    started = []

    def start(place):
        actor = ray.remote(num_cpus=0)(Waits).remote()
        started.append(place)
        return actor, actor.pid.remote()

    spares = Spares(["here", "there"])
    spares.restock(start)
    pids = [ray.get(spare.warm, timeout=PATIENCE_S) for spare in spares._waiting]
    for _ in range(3):
        spares.look()
        spares.restock(start)
        time.sleep(0.2)
    assert started == ["here", "there"] and spares.has_warm()
    os.kill(pids[1], signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while len(started) == 2 and time.monotonic() < deadline:
        spares.look()
        spares.restock(start)
        time.sleep(0.1)
    assert started == ["here", "there", "there"] and len(spares.actors) == 2
    taken = spares.take(2)
    assert taken and taken[0].place == "here"


# A number of seconds that means an error.
ERROR = 12345


class Encoder(nn.Module):
    """Encoder (n, 3) -> (n, 2, 4) that sleeps for the seconds of its input, or raises.

    For negative seconds it blocks all other threads.
    """

    hidden_size = 4

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.stem = nn.Linear(3, 8)

    def forward(self, x, sleep=None):
        seconds = 0 if sleep is None else int(sleep.max())
        if seconds == ERROR:
            raise RuntimeError("gloo: socket of the feature store: connection closed by peer")
        if seconds < 0:  # with the interpreter's lock
            ctypes.PyDLL(None).sleep(-seconds)
        time.sleep(max(seconds, 0))
        hidden = self.stem(x).view(-1, 2, 4)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def model_of(layers: int = 2, dropout: float = 0.0) -> MultimodalModule:
    torch.manual_seed(0)
    llm = hf.LlamaForCausalLM(hf.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=16, attention_dropout=dropout,
    ))
    vision = ModalityModule(Encoder(), "linear", example_inputs={"x": torch.zeros(1, 3)})
    return MultimodalModule({"vision": vision}, ModalityModule(llm))


def microbatch(rows: int, with_image: bool = True, sleep: int = 0) -> dict:
    ids = torch.arange(rows * 5).view(rows, 5) % 16
    batch = {"input_ids": ids, "labels": ids.clone()}
    if with_image:
        batch["vision"] = {"x": torch.ones(rows, 3), "sleep": torch.full((rows,), sleep)}
    return batch


def alive_actors(ray) -> set[str]:
    from ray._private.state import actors

    return {key for key, info in actors().items() if info["State"] not in ("DEAD", 4)}


def placement_groups(ray) -> set[str]:
    table = ray.util.placement_group_table()
    return {key for key, info in table.items() if info["state"] != "REMOVED"}


def test_a_frozen_stage_has_no_backward_and_receives_no_gradient(ray_cluster):
    """Check the spans of the executed timeline."""
    model = model_of()
    model.freeze(encoders=True, projectors=False, llm=True)
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(pp=2, ranks=(0, 1))}, ParallelSpec(ranks=(0,)), 2
    )
    with spec.apply(model) as parallel:
        timeline = parallel.execute([microbatch(2), microbatch(3, False), microbatch(1)]).timeline
        seen = {}
        for span in timeline.spans:
            seen.setdefault(span.stage, set()).add((span.op, span.microbatch, span.peer))
        # Frozen, and nothing trainable before it: forward only, no gradient arrives.
        assert seen[StageId("vision", 0)] == {
            (op, m, peer) for m in (0, 2)
            for op, peer in [(Op.FORWARD_NO_GRAD, NO_STAGE), (Op.SEND, StageId("vision", 1))]
        }
        # Frozen blocks with the trainable projector: backward, but nothing is sent further back.
        assert seen[StageId("vision", 1)] == {
            (op, m, peer)
            for m in (0, 2)
            for op, peer in [
                (Op.RECV, StageId("vision", 0)), (Op.FORWARD, NO_STAGE),
                (Op.SEND, StageId("llm", 0)), (Op.RECV, StageId("llm", 0)),
                (Op.BACKWARD, NO_STAGE),
            ]
        }
        # Frozen with a trainable module before it: backward; none for the text-only microbatch.
        assert {(op, m) for op, m, _ in seen[StageId("llm", 0)] if op in (
            Op.FORWARD, Op.FORWARD_NO_GRAD, Op.BACKWARD)} == {
            (Op.FORWARD, 0), (Op.BACKWARD, 0), (Op.FORWARD_NO_GRAD, 1),
            (Op.FORWARD, 2), (Op.BACKWARD, 2),
        }
        text = parallel.execute([microbatch(2, False)]).timeline
        assert {(s.stage, s.op) for s in text.spans} == {(StageId("llm", 0), Op.FORWARD_NO_GRAD)}


def test_more_ranks_than_the_cluster_has(ray_cluster):
    cpus = int(ray_cluster.cluster_resources()["CPU"])
    actors, groups = alive_actors(ray_cluster), placement_groups(ray_cluster)
    model = model_of(layers=cpus)
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=cpus))
    with pytest.raises(
        ClusterError, match=rf"{cpus + 1} ranks of 1 CPU each.*the cluster has {cpus} CPU"
    ):
        spec.apply(model)
    # None was created; actors of an earlier test may have ended meanwhile.
    assert alive_actors(ray_cluster) <= actors
    assert placement_groups(ray_cluster) <= groups


@pytest.mark.timeout(120)  # the step would take ten minutes: the failure must end it
def test_a_killed_rank_ends_the_step_and_is_named(ray_cluster, tmp_path):
    """Kill a rank with SIGKILL in the middle of a step.

    The only leftovers are stacks of the others and the name of the last record of NCCL's flight
    recorder. Before, on the same ranks: dropout is active in training and not in evaluation.
    """
    actors, groups = alive_actors(ray_cluster), placement_groups(ray_cluster)
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=2), 2)
    model = model_of(dropout=0.5)
    parallel = spec.apply(model)
    step = [microbatch(2)]
    trained = parallel.execute(step).loss
    evaluated = parallel.evaluate(step).loss
    assert parallel.execute(step).loss != trained  # another batch of the same update
    parallel.zero_grad()
    # the first batch again, with the same random numbers
    assert parallel.execute(step).loss == trained
    assert abs(trained - evaluated) > 1e-4
    assert abs(model.eval()(**step[0]).item() - evaluated) < 1e-6
    victim = parallel.group.pids()[2]["pid"]
    pending = parallel.submit(parallel.prepare([microbatch(1, sleep=600)]))
    time.sleep(1)  # vision.0 sleeps now, the others wait for it
    record = Path(tempfile.gettempdir()) / f"raymm-nccl-{victim}-rank-2"
    record.write_text("of a GPU")
    os.kill(victim, signal.SIGKILL)
    named = r"rank 2 \(stages llm\.1, process \d+ .*\) died"
    with faults_kept_in(tmp_path), pytest.raises(RankFailedError, match=named) as caught:
        pending.result()
    record.unlink()
    _, recorded, kept = str(caught.value).split("\n")
    assert recorded.startswith("NCCL's flight recorder") and recorded.endswith(f": {record}")
    stacks = [Path(kept.rpartition("stacks: ")[2]) / f"rank-{rank}.txt" for rank in range(3)]
    assert all("most recent call first" in file.read_text() for file in stacks[:2])
    assert "died" in stacks[2].read_text()
    deadline = time.monotonic() + 30
    while not alive_actors(ray_cluster) <= actors and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive_actors(ray_cluster) <= actors
    assert placement_groups(ray_cluster) <= groups


@pytest.mark.timeout(400)
def test_a_killed_process_of_a_rank_is_named(ray_cluster):
    """Let the others wait in collectives in the middle of a layer, not for a message."""
    parallel = MultimodalParallelSpec({}, ParallelSpec(tp=2, cp=2)).apply(model_of())
    prepared = parallel.prepare([microbatch(2)])
    parallel.submit(prepared).result()
    victim = parallel.group.pids()[3]["pid"]
    under_way = [parallel.submit(prepared) for _ in range(60)]
    under_way[0].result()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(
        RankFailedError,
        match=r"rank 3 \(stages llm\.0, cp 1 of 2, tp 0 of 2, process \d+ .*\) died",
    ):
        for pending in under_way:
            pending.result()


@pytest.mark.timeout(120)
def test_a_rank_killed_between_steps_is_named(ray_cluster):
    """Let the others post receives outside of any instruction."""
    parallel = MultimodalParallelSpec({}, ParallelSpec(pp=2), 2).apply(model_of())
    prepared = parallel.prepare([microbatch(2), microbatch(2)])
    parallel.submit(prepared).result()
    victim = parallel.group.pids()[1]["pid"]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RankFailedError, match=r"^rank 1 \(stages llm\.0, process \d+ .*\) died"):
        for _ in range(100):
            parallel.submit(prepared).result()


HUNG = {
    "stopped": r"does not answer; it is stopped by a signal",
    "sleeps": r"has been in forward vision\.0 of microbatch 0 for \d+\.\d s",
    "holds the lock": r"does not answer; it is \w+",
}


@pytest.mark.cells(2)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", HUNG)
def test_a_rank_that_hangs_is_named_and_its_stacks_are_kept(ray_cluster, tmp_path, how):
    """Let the last rank hang in C code with the interpreter's lock."""
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=2), 1)
    with faults_kept_in(tmp_path):
        parallel = spec.apply(model_of(), timeout_s=4)
        parallel.execute([microbatch(1)])
        seconds = {"stopped": 0, "sleeps": 600, "holds the lock": -600}[how]
        hung = parallel.group.pids()[0]["pid"]
        if how == "stopped":
            os.kill(hung, signal.SIGSTOP)
        first = rf"^rank 0 \(stages vision\.0.*\) {HUNG[how]}"
        with pytest.raises(RankFailedError, match=first) as caught:
            parallel.execute([microbatch(1, sleep=seconds)])
    message = str(caught.value)
    other = r"\nrank 1 .* (has waited for others|gave up) in recv llm\.0 of microbatch 0 from "
    assert re.search(other, message), message
    folder = Path(message.rpartition("stacks: ")[2])
    assert folder.is_relative_to(tmp_path / "faults")
    stacks = [(folder / f"rank-{rank}.txt").read_text() for rank in range(3)]
    assert ("in forward" in stacks[0]) == (how != "stopped"), stacks[0]
    assert "most recent call first" in stacks[1] and "most recent call first" in stacks[2]
    # A stopped process does not respond to Ray.
    wait_for_end(hung)


@pytest.mark.timeout(120)
def test_a_rank_without_waiting_peers_does_not_hang(ray_cluster):
    spec = MultimodalParallelSpec({"vision": ParallelSpec(ranks=(0,))}, ParallelSpec(ranks=(0,)))
    parallel = spec.apply(model_of(), timeout_s=3)
    parallel.execute([microbatch(1)])  # the driver itself tries new properties of a batch
    first = (
        r"^rank 0 .* has been in forward vision\.0.*\nno rank has started a new instruction for 3 s"
    )
    with pytest.raises(RankFailedError, match=first):
        parallel.execute([microbatch(1, sleep=600)])


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.1)


@pytest.mark.timeout(120)
def test_an_error_about_sockets_keeps_its_traceback(ray_cluster, tmp_path):
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=2), 1)
    with faults_kept_in(tmp_path):
        parallel = spec.apply(model_of())
        parallel.execute([microbatch(1)])
        first = r"^rank 0 .* failed: RuntimeError: gloo: socket"
        with pytest.raises(RankFailedError, match=first) as caught:
            parallel.execute([microbatch(1, sleep=ERROR)])
    text = str(caught.value)
    assert "in forward" in text and "connection closed" in text
    assert "in forward" in (Path(text.rpartition("stacks: ")[2]) / "rank-0.txt").read_text()


def no_such_file() -> nn.Module:
    return nn.Linear(*Path("/nowhere/sizes.txt").read_text())


class Unreadable:
    """Object that the receiving process cannot unpickle."""

    def __reduce__(self):
        return no_such_file, ()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("builder", [no_such_file, Unreadable()])
def test_a_failed_start_keeps_its_traceback(ray_cluster, tmp_path, builder):
    """Fail to build a stage, or to unpickle its specification."""
    spec = RankSpec(
        rank=0, world_size=1, builders={StageId("llm", 0): builder}, edges=()
    )
    with faults_kept_in(tmp_path), pytest.raises(RankFailedError) as caught:
        RankGroup([spec], ["llm.0"], RankResources())
    first = str(caught.value).partition("\n")[0]
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/sizes.txt'" in first
    kept = (Path(str(caught.value).rpartition("stacks: ")[2]) / "rank-0.txt").read_text()
    assert "in no_such_file" in kept and kept.count("File ") > 2
    assert str(tmp_path) in str(caught.value)


def with_threads_of_openmp() -> nn.Module:
    """Return as many features as OpenMP has threads in the calling thread.

    torch's own number is that of the process, and differs in threads that have not called OpenMP
    yet.
    """
    (library,) = Path(torch.__file__).parent.glob("lib/libgomp*")
    return nn.Linear(ctypes.CDLL(str(library)).omp_get_max_threads(), 1, bias=False)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_worker_has_the_requested_threads(ray_cluster, threads):
    builders = {StageId("llm", 0): with_threads_of_openmp}
    spec = RankSpec(0, 1, builders, edges=(), threads=threads)
    group = RankGroup([spec], ["llm.0"], RankResources())
    group.shutdown()
    assert group.num_parameters == [{StageId("llm", 0): threads}]


class FromSysPath:
    """Class in a folder that only the sending program searches."""

    def __reduce__(self):
        return import_module, ("only_on_the_drivers_path",)


def test_a_module_missing_on_ranks_is_named(ray_cluster, tmp_path):
    spec = RankSpec(0, 1, {StageId("llm", 0): FromSysPath()}, edges=())
    with faults_kept_in(tmp_path), pytest.raises(RankFailedError) as caught:
        RankGroup([spec], ["llm.0"], RankResources())
    assert "No module named 'only_on_the_drivers_path'" in str(caught.value)
    assert "PYTHONPATH" in str(caught.value).partition("\n")[0]
