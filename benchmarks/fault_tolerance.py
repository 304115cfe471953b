"""What it costs a run to be able to go on in place, and how long that takes.

A Llama of two stages trains on Ray actors, in turns of as many steps with and without snapshots
(:class:`raymm.actors.recovery.snapshots.Snapshots`), two steps in flight as the trainer has it.
`overhead` is what a turn with a snapshot every `--every` steps takes more, as a share of one
without, the median over rounds; `every_step` the same of a snapshot per step. `copy_s` is the copy
in host memory, the call included, which alone is in the steps' way, the least over rounds, and
`copy_share` that of a step. Then a rank is
killed: `recovery_s` is from the error until all have gone back to the snapshot, `renew_s` of it
until all have met anew, medians.

    python -m benchmarks.fault_tolerance --json
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections import deque
from typing import Any

import torch
from rich.table import Table
from transformers import LlamaConfig

from benchmarks import _common
from raymm.actors.recovery.snapshots import Snapshots
from raymm.errors import RankFailedError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.pipelined import MultimodalParallelModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec

MICROBATCHES, STAGES, IN_FLIGHT = 4, 2, 2
WARM_UP_STEPS = 3


def build(hidden: int, layers: int, tokens: int) -> tuple[MultimodalModule, list[dict[str, Any]]]:
    """The model, and a step's microbatches."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, vocab_size=1024, tie_word_embeddings=False,
    )
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 1024, (1, tokens), generator=draw) for _ in range(MICROBATCHES)]
    batch = [{"input_ids": ids, "labels": ids} for ids in batches]
    return MultimodalModule({}, ModalityModule(config, seed=1)), batch


def turn(
    parallel: MultimodalParallelModule, prepared: Any, steps: int, snapshots: Snapshots | None,
    every: int,
) -> float:
    """Seconds of so many steps, the last of which is waited for.

    Args:
        parallel: the model.
        prepared: a step's microbatches.
        steps: how many.
        snapshots: are taken; None for none.
        every: so many steps.
    """
    start, pending = time.perf_counter(), deque()
    for number in range(1, steps + 1):
        pending.append(parallel.submit(prepared, update=True))
        if snapshots is not None and number % every == 0:
            snapshots.take(parallel.steps_taken)
        if len(pending) == IN_FLIGHT:
            pending.popleft().result()
    while pending:
        pending.popleft().result()
    return time.perf_counter() - start


def copy(parallel: MultimodalParallelModule) -> float:
    """Seconds of what alone is in the steps' way: the copy in host memory, on all ranks."""
    start = time.perf_counter()
    parallel.group.call("copy_snapshot")
    seconds = time.perf_counter() - start
    parallel.group.call("hand_over_snapshot")
    return seconds


def recovery(
    parallel: MultimodalParallelModule, prepared: Any, snapshots: Snapshots
) -> tuple[float, float]:
    """Seconds from an error until ranks have met anew, and until they have gone back."""
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


def measure(args: Any) -> dict[str, Any]:
    """All figures."""
    model, batch = build(args.hidden, args.layers, args.tokens)
    plan = MultimodalParallelSpec({}, ParallelSpec(pp=STAGES), MICROBATCHES).plan(model)
    shares: dict[str, list[float]] = {"every_step": [], "overhead": []}
    plain, times = [], []
    with _common.local_ray(4), MultimodalParallelModule(model, plan) as parallel:
        parallel.group.keeps_survivors = True
        snapshots, prepared = Snapshots(parallel.group), parallel.prepare(batch)
        turn(parallel, prepared, WARM_UP_STEPS, snapshots, 1)
        for _ in range(args.rounds):
            # Around each turn with snapshots one without: what drifts counts for neither.
            seconds = [turn(parallel, prepared, args.every, None, 1)]
            for name, every in (("every_step", 1), ("overhead", args.every)):
                taken = turn(parallel, prepared, args.every, snapshots, every)
                seconds.append(turn(parallel, prepared, args.every, None, 1))
                shares[name].append(taken / statistics.mean(seconds[-2:]) - 1)
            plain += seconds
        parameters = sum(sum(stages.values()) for stages in parallel.group.num_parameters)
        copies = [copy(parallel) for _ in range(args.rounds)]
        for _ in range(args.kills):
            times.append(recovery(parallel, prepared, snapshots))
    step_s = statistics.median(plain) / args.every
    return {
        "step_s": round(step_s, 4), "every": args.every,
        "copy_s": round(min(copies), 4), "copy_share": round(min(copies) / step_s, 4),
        "parameters": parameters,
        **{name: round(statistics.median(values), 4) for name, values in shares.items()},
        "overhead_of_rounds": [round(value, 4) for value in shares["overhead"]],
        "renew_s": round(statistics.median(renewed for renewed, _ in times), 3),
        "recovery_s": round(statistics.median(seconds for _, seconds in times), 3),
    }


def main() -> None:
    """Run and print."""
    parser = _common.parser(str(__doc__).split("\n", 1)[0])
    parser.add_argument("--hidden", type=int, default=256, help="the model's hidden size")
    parser.add_argument("--layers", type=int, default=4, help="its layers")
    parser.add_argument("--tokens", type=int, default=512, help="of a microbatch")
    parser.add_argument("--every", type=int, default=10, help="steps between snapshots")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kills", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(args)
    table = Table("figure", "value")
    for name, value in result.items():
        table.add_row(name, str(value))
    _common.console().print(table)
    _common.emit({**result, "machine": _common.machine()}, args.json)


if __name__ == "__main__":
    main()
