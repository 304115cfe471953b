"""Claim: in-place recovery takes seconds, and its snapshots cost steps little time.

Run with `python -m benchmarks.fault_tolerance --json`.

A Llama of two stages trains on Ray actors in rounds of `TURN` steps with two steps in flight, as in
the trainer. Every other round takes a snapshot (:class:`raymm.actors.recovery.snapshots.Snapshots`)
after its first step. The cost of a snapshot is the additional time of its round over the rounds
without one before and after it: `snapshot_s` is the median over pairs, and `snapshot_cpu_s` the
same in CPU seconds of ranks and driver, on which other work on the machine has less effect.
`overhead` is the cost of a snapshot every `--every` steps as a share of these steps, plus the cost
of heartbeats per second, `heartbeat_cpu`, in CPU seconds of all processes; `overhead_cpu` uses CPU
seconds throughout, `overhead_low` and `overhead_high` are the quartiles of `overhead`. `copy_s` is
the minimum time of the copy to host memory, including the call, which is the only part that blocks
steps, and `copy_share` is its share of a step. Pairs are measured for `--seconds`.

Then a rank is killed: `recovery_s` is the time from the error until all ranks have restored the
snapshot, `renew_s` the part until the rendezvous is complete, medians; `spare_recovery_s` and
`spare_renew_s` are the same with a spare process, `fresh_recovery_s` with a new process that
imports everything, as on a cluster (the other new processes are forked from one that already has,
as in every run with its own Ray).
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from rich.table import Table
from transformers import LlamaConfig

from benchmarks.shared import common
from raymm.actors.faults.inquiry import BEAT_S, inquire
from raymm.actors.placement.placement import PlacementOptions
from raymm.actors.recovery.snapshots import Snapshots
from raymm.errors import RankFailedError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.embedded.embedded_ray import start_embedded_ray
from raymm.runtime.embedded.forked_workers import OFF, start_servers
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec

MICROBATCHES, STAGES, IN_FLIGHT, HEARTBEATS, COPIES = 4, 2, 2, 100, 5
# Steps of a round: background work of a snapshot ends within them.
TURN = 3
# Minimum number of pairs.
FEWEST_PAIRS = 4
CPUS = 4
# Seconds until a spare process must be ready.
WARM_S = 120.0


class Seconds(NamedTuple):
    """Wall seconds, and CPU seconds of all involved processes."""

    wall: float
    cpu: float


def build(hidden: int, layers: int, tokens: int) -> tuple[MultimodalModule, list[dict[str, Any]]]:
    """Return the model, and a step's microbatches."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, vocab_size=1024, tie_word_embeddings=False,
    )
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 1024, (1, tokens), generator=draw) for _ in range(MICROBATCHES)]
    batch = [{"input_ids": ids, "labels": ids} for ids in batches]
    return MultimodalModule({}, ModalityModule(config, seed=1)), batch


def turn(
    parallel: ParallelModel, prepared: Any, snapshots: Snapshots | None
) -> Seconds:
    """Measure :data:`TURN` steps, including the wait for the last.

    Args:
        snapshots: takes a snapshot after the first step; None for none.
    """
    cpu = _cpu_seconds(parallel)
    start, pending = time.perf_counter(), deque()
    for number in range(TURN):
        pending.append(parallel.submit(prepared, update=True))
        if snapshots is not None and number == 0:
            snapshots.take(parallel.steps_taken)
        if len(pending) == IN_FLIGHT:
            pending.popleft().result()
    while pending:
        pending.popleft().result()
    wall = time.perf_counter() - start
    return Seconds(wall, _cpu_seconds(parallel) - cpu)


def _cpu_seconds(parallel: ParallelModel) -> float:
    """Return the CPU seconds of the driver and all ranks so far."""
    ticks = 0
    for pid in [os.getpid(), *(place.pid for place in parallel.group.places)]:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def heartbeat(parallel: ParallelModel) -> float:
    """Return CPU seconds of one heartbeat to all ranks over the second between two of them.

    CPU seconds are those of all processes.
    """
    actors = dict(enumerate(parallel.group._actors))
    cpu = _cpu_seconds(parallel)
    for _ in range(HEARTBEATS):
        inquire(actors)
    return (_cpu_seconds(parallel) - cpu) / HEARTBEATS / BEAT_S


def copy(parallel: ParallelModel) -> float:
    """Return seconds of the copy to host memory on all ranks, the only part that blocks steps."""
    start = time.perf_counter()
    parallel.group.call("copy_snapshot")
    seconds = time.perf_counter() - start
    parallel.group.call("hand_over_snapshot")
    return seconds


def recovery(
    parallel: ParallelModel, prepared: Any, snapshots: Snapshots
) -> tuple[float, float]:
    """Return seconds from an error to the completed rendezvous, and to the restored snapshot.

    Waits for a spare process first, if the run has spares.
    """
    deadline = time.monotonic() + WARM_S
    while parallel.options.placement.spares and not parallel.group.has_spare():
        assert time.monotonic() < deadline, "no spare process is ready"
        time.sleep(0.05)
    snapshots.take(parallel.steps_taken)
    parallel.submit(prepared).result()
    step = snapshots.newest()
    assert step is not None
    pids = parallel.group.pids()
    pending = parallel.submit(prepared, update=True)
    os.kill(pids[0]["pid"], signal.SIGKILL)
    try:
        pending.result()
    except RankFailedError:
        start = time.perf_counter()
    pending.forget()
    parallel.renew()
    renewed = time.perf_counter() - start
    parallel.restore_step(snapshots.restore().step)
    seconds = time.perf_counter() - start
    parallel.submit(prepared, update=True).result()
    return renewed, seconds


def costs(
    parallel: ParallelModel, prepared: Any, every: int, seconds: float
) -> dict[str, Any]:
    """Return the costs of snapshots and heartbeats."""
    snapshots = Snapshots(parallel.group)
    turn(parallel, prepared, snapshots)
    deadline = time.monotonic() + seconds
    plain, extra = [turn(parallel, prepared, None)], []
    while len(extra) < FEWEST_PAIRS or time.monotonic() < deadline:
        # Each round with a snapshot is between two without, so that drift cancels.
        taken = turn(parallel, prepared, snapshots)
        plain.append(turn(parallel, prepared, None))
        around = [statistics.mean(times) for times in zip(*plain[-2:], strict=True)]
        extra.append(Seconds(taken.wall - around[0], taken.cpu - around[1]))
    step_s = statistics.median(seconds.wall for seconds in plain) / TURN
    step_cpu_s = statistics.median(seconds.cpu for seconds in plain) / TURN
    beat = heartbeat(parallel)
    low, middle, high = statistics.quantiles([each.wall for each in extra])
    cpu = statistics.median(each.cpu for each in extra)
    copies = min(copy(parallel) for _ in range(COPIES))
    values = {
        "step_s": step_s, "step_cpu_s": step_cpu_s, "snapshot_s": middle, "snapshot_cpu_s": cpu,
        "copy_s": copies, "copy_share": copies / step_s, "heartbeat_cpu": beat,
        "overhead": middle / (every * step_s) + beat,
        "overhead_low": low / (every * step_s) + beat,
        "overhead_high": high / (every * step_s) + beat,
        "overhead_cpu": cpu / (every * step_cpu_s) + beat,
    }
    return {
        **{name: round(value, 4) for name, value in values.items()},
        "every": every, "pairs": len(extra),
        "parameters": sum(sum(stages.values()) for stages in parallel.group.num_parameters),
    }


def recoveries(
    model: MultimodalModule, plan: Any, batch: Any, kills: int, spares: int, name: str
) -> dict[str, float]:
    """Return medians of :func:`recovery` under two names."""
    options = PlacementOptions(spares=spares)
    with ParallelModel(model, plan, placement=options) as parallel:
        parallel.group.keeps_survivors = True
        snapshots, prepared = Snapshots(parallel.group), parallel.prepare(batch)
        turn(parallel, prepared, snapshots)
        times = [recovery(parallel, prepared, snapshots) for _ in range(kills)]
    return {
        f"{name}renew_s": round(statistics.median(renewed for renewed, _ in times), 3),
        f"{name}recovery_s": round(statistics.median(seconds for _, seconds in times), 3),
    }


def measure(args: Any) -> dict[str, Any]:
    """Return all figures."""
    model, batch = build(args.hidden, args.layers, args.tokens)
    plan = MultimodalParallelSpec({}, ParallelSpec(pp=STAGES), MICROBATCHES).plan(model)
    start_servers(2, ["transformers.models.llama.modeling_llama"])
    start_embedded_ray(num_cpus=CPUS, log_to_driver=False, logging_level="error")
    with ParallelModel(model, plan) as parallel:
        prepared = parallel.prepare(batch)
        result = costs(parallel, prepared, args.every, args.seconds)
    for name, spares in (("", 0), ("spare_", 1)):
        result |= recoveries(model, plan, batch, args.kills, spares, name)
    ray.shutdown()
    os.environ[OFF] = "1"
    start_embedded_ray(num_cpus=CPUS, log_to_driver=False, logging_level="error")
    result |= recoveries(model, plan, batch, args.kills, 0, "fresh_")
    ray.shutdown()
    return result


def main() -> None:
    parser = common.parser(str(__doc__).split("\n", 1)[0])
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per microbatch")
    parser.add_argument("--every", type=int, default=10, help="steps between snapshots")
    parser.add_argument("--seconds", type=float, default=60, help="seconds of measured steps")
    parser.add_argument("--kills", type=int, default=2, help="killed ranks per kind of recovery")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(args)
    table = Table("figure", "value")
    for name, value in result.items():
        table.add_row(name, str(value))
    common.console().print(table)
    common.emit({**result, "machine": common.machine()}, args.json)


if __name__ == "__main__":
    main()
