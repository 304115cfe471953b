"""Claim: raymm's pipeline overhead is at most that of torch.distributed.pipelining.

Run with `python -m benchmarks.pipeline_overhead --json`.

A chain of four stages runs forward and backward in 1F1B order, in four processes per contender, all
on this machine. Contenders alternate within a round, so that they see the same load. Each grid
point's figure is the median over rounds of one step's wall time in the driver: from the dispatch of
the step until every stage has finished it. It is reported with the CPU time of a step over all its
processes and the driver, on which other work on the machine has less effect.
"""

import argparse
import contextlib
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from benchmarks.baselines.actor_calls import ActorCallsContender
from benchmarks.baselines.chain import ChainConfig, ChainResult, calibrate_burn, reference
from benchmarks.baselines.compiled_graph import (
    ArrayCompiledGraphContender,
    CompiledGraphContender,
    PlainCompiledGraphContender,
)
from benchmarks.baselines.contender import Contender
from benchmarks.baselines.isend_irecv import LoopContender
from benchmarks.baselines.raymm_pipeline import RaymmContender
from benchmarks.baselines.torch_pipelining import PipeliningContender
from benchmarks.baselines.varied_pipeline import NewShapesContender, VariedContender
from benchmarks.shared.common import console, emit, local_ray, machine, parser

CONTENDERS: dict[str, type[Contender]] = {
    contender.name: contender
    for contender in (
        RaymmContender,
        PipeliningContender,
        CompiledGraphContender,
        ArrayCompiledGraphContender,
        PlainCompiledGraphContender,
        ActorCallsContender,
        LoopContender,
        VariedContender,
        NewShapesContender,
    )
}
RATIOS = {
    "raymm_over_torch_pipelining": PipeliningContender.name,
    "raymm_over_compiled_graph": CompiledGraphContender.name,
    "raymm_over_compiled_graph_numpy": ArrayCompiledGraphContender.name,
    "raymm_over_compiled_graph_plain": PlainCompiledGraphContender.name,
    "raymm_over_actor_calls": ActorCallsContender.name,
    "raymm_over_floor": LoopContender.name,
}
VARIED = {
    "varied_over_fixed": VariedContender.name, "new_over_fixed": NewShapesContender.name,
}  # fmt: skip
MESSAGE_BYTES = (64 * 2**10, 4 * 2**20)
MICROBATCHES = (8, 24)
COMPUTE_MS = (0.0, 1.0)
QUICK_MESSAGE_BYTES = (64 * 2**10,)
QUICK_MICROBATCHES = (8,)
WARM_UP_STEPS = 3
# The first step after the others' turns finds cold caches, so it is not counted.
STEPS_PER_TURN = 3
# A contender that exceeds this time does fewer steps: the first and one counted per turn, and fewer
# turns.
TURN_SECONDS = 1.0
GRID_POINT_SECONDS = 6.0
RELATIVE_TOLERANCE = 1e-4


@contextlib.contextmanager
def turn_of(contender: Contender) -> Iterator[None]:
    """Pause the other contenders while `contender` works."""
    contender.resume()
    try:
        yield
    finally:
        contender.pause()


def check(contender: Contender, config: ChainConfig) -> None:
    """Run a step of `config` and compare loss and gradients with a single process.

    Raises:
        AssertionError: a number differs by more than RELATIVE_TOLERANCE.
    """
    with turn_of(contender):
        contender.setup(config)
        contender.dispatch()
        compare(contender.name, contender.result(), config)


def compare(name: str, got: ChainResult, config: ChainConfig) -> None:
    """Raise AssertionError unless `got` equals `reference(config)`."""
    want = reference(config)
    pairs = zip(
        (got.loss, *got.weight_gradients), (want.loss, *want.weight_gradients), strict=True
    )
    if not all(math.isclose(a, b, rel_tol=RELATIVE_TOLERANCE) for a, b in pairs):
        raise AssertionError(f"{name} computed {got} for {config}, a single process {want}")


def take_steps(contender: Contender, most: int) -> list[float]:
    """Return milliseconds of `most` steps, or of two if these already take TURN_SECONDS."""
    times: list[float] = []
    while len(times) < most and (len(times) < 2 or sum(times) < TURN_SECONDS * 1e3):
        times.append(contender.step() * 1e3)
    return times


def cpu_ms(pids: list[int]) -> float:
    """Return CPU milliseconds of all threads of processes so far; 0 if Linux does not report them.
    """
    nanoseconds = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the process has ended
                nanoseconds += int(thread.read_text().split()[0])
    return nanoseconds / 1e6


def measure(
    contenders: list[Contender], config: ChainConfig, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Measure contenders in alternating turns.

    Returns:
        Milliseconds of every counted step of `config` by contender, and CPU milliseconds per step
        of every turn.
    """
    cpu: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        with turn_of(contender):
            contender.setup(config)
            take_steps(contender, WARM_UP_STEPS)
    pids = {contender.name: [os.getpid(), *contender.pids()] for contender in contenders}
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        # Start with another contender each round, so that none always follows the same one.
        shift = turn % len(contenders)
        for contender in contenders[shift:] + contenders[:shift]:
            if sum(times[contender.name]) > GRID_POINT_SECONDS * 1e3:
                continue
            with turn_of(contender):
                before = cpu_ms(pids[contender.name])
                taken = take_steps(contender, STEPS_PER_TURN)
                cpu[contender.name].append((cpu_ms(pids[contender.name]) - before) / len(taken))
                times[contender.name] += taken[1:]
    for contender in contenders:
        with turn_of(contender):
            compare(contender.name, contender.result(), config)
    return times, cpu


def run_grid(contenders: list[Contender], options: argparse.Namespace) -> list[dict]:
    """Return one row per grid point: its configuration, and medians and quartiles in ms."""
    out = console()
    burn_repeats = {ms: calibrate_burn(ms) if ms else 0 for ms in COMPUTE_MS}
    sizes = QUICK_MESSAGE_BYTES if options.quick else MESSAGE_BYTES
    counts = QUICK_MICROBATCHES if options.quick else MICROBATCHES
    rows = []
    for message_bytes, microbatches in itertools.product(sizes, counts):
        for contender in contenders:
            check(contender, ChainConfig(message_bytes, microbatches, scaled=True))
        for compute_ms in COMPUTE_MS:
            config = ChainConfig(message_bytes, microbatches, burn_repeats[compute_ms])
            times, cpu = measure(contenders, config, options.rounds)
            rows.append(
                {
                    "compute_ms": compute_ms,
                    "message_bytes": message_bytes,
                    "microbatches": microbatches,
                    "median_ms": {n: round(statistics.median(t), 2) for n, t in times.items()},
                    "cpu_ms": {n: round(statistics.median(t), 2) for n, t in cpu.items()},
                    "quartiles_ms": {n: quartiles(t) for n, t in times.items()},
                    "steps": {n: len(t) for n, t in times.items()},
                }
            )
            out.print(
                f"[dim]{rows[-1]['median_ms']}, CPU {rows[-1]['cpu_ms']} ({compute_ms:g} ms "
                f"compute, {message_bytes // 1024} KB, {microbatches} microbatches)"
            )
    return rows


def quartiles(times: list[float]) -> list[float]:
    """Return the first and third quartile, rounded; a single value twice."""
    cuts = statistics.quantiles(times, n=4) if len(times) > 1 else times
    return [round(cuts[0], 2), round(cuts[-1], 2)]


def worst_ratios(rows: list[dict]) -> dict[str, float]:
    """Return the largest ratio of medians over the grid for each measured pair in RATIOS.

    Ratios are of wall time, and of CPU time.
    """
    result = {}
    for prefix, figure in (("", "median_ms"), ("cpu_", "cpu_ms")):
        for key, other in RATIOS.items():
            ratios = [
                row[figure][RaymmContender.name] / row[figure][other]
                for row in rows
                if {RaymmContender.name, other} <= row[figure].keys() and row[figure][other]
            ]
            if ratios:
                result[prefix + key] = round(max(ratios), 3)
    return result


def varied_ratios(rows: list[dict]) -> dict[str, float]:
    """Return the largest ratio over the grid of messages with many shapes to those with one."""
    result = {}
    for key, varied in VARIED.items():
        ratios = [
            row["median_ms"][varied] / row["median_ms"][RaymmContender.name]
            for row in rows if {RaymmContender.name, varied} <= row["median_ms"].keys()
        ]
        if ratios:
            result[key] = round(max(ratios), 3)
    return result


def table(rows: list[dict]) -> Table:
    """Return a table of medians with one line per grid point, one column per contender."""
    names = list(rows[0]["median_ms"])
    result = Table(title="ms per step, median (4 stages, forward + backward, 1F1B)")
    for heading in ("compute ms", "message KB", "microbatches", *names):
        result.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        point = f"{row['compute_ms']:g}", f"{row['message_bytes'] // 1024}", row["microbatches"]
        medians = (f"{row['median_ms'][name]:.1f}" for name in names)
        result.add_row(*map(str, point), *medians)
    return result


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=10, help="turns of each contender")
    options.add_argument("--quick", action="store_true", help="one message size, 8 microbatches")
    options.add_argument(
        "--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="CONTENDER",
        help=f"contenders to run, of {', '.join(CONTENDERS)}",
    )
    chosen = options.parse_args()
    if chosen.rounds < 1:
        options.error(f"--rounds {chosen.rounds}: must be at least 1")
    return chosen


def main() -> int:
    """Run the grid, print the table, then the result line."""
    options = arguments()
    import torch

    torch.set_num_threads(1)
    started = time.perf_counter()
    described = machine()
    contenders = [CONTENDERS[name]() for name in dict.fromkeys(options.only)]
    with local_ray(num_cpus=4 * len(contenders)), contextlib.ExitStack() as cleanup:
        for contender in contenders:
            cleanup.callback(contender.close)
        rows = run_grid(contenders, options)
    result = {
        "benchmark": "pipeline_overhead",
        **worst_ratios(rows),
        **varied_ratios(rows),
        "grid": rows,
        "rounds": options.rounds,
        "load_average_1min_after": round(os.getloadavg()[0], 2),
        "seconds": round(time.perf_counter() - started, 1),
        "machine": described,
    }
    console().print(table(rows), {key: result[key] for key in RATIOS if key in result})
    emit(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
