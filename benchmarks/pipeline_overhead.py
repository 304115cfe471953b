"""What a pipeline runtime costs beside the work: `python -m benchmarks.pipeline_overhead --json`.

A chain of four stages runs forward and backward in 1F1B order, in four processes per contender,
all on this machine. Contenders take turns within a round, so that they meet the same machine,
and each grid point's figure is the median over rounds of one step's wall time, seen from the
driver: from dispatching the step until every stage has finished it.
"""

import argparse
import contextlib
import itertools
import math
import statistics
import sys
import time

from rich.table import Table

from benchmarks._common import console, emit, local_ray, machine, parser
from benchmarks.baselines.actor_calls import ActorCallsContender
from benchmarks.baselines.chain import ChainConfig, ChainResult, calibrate_burn, reference
from benchmarks.baselines.compiled_graph import CompiledGraphContender
from benchmarks.baselines.contender import Contender
from benchmarks.baselines.isend_irecv import LoopContender
from benchmarks.baselines.raymm_pipeline import RaymmContender
from benchmarks.baselines.torch_pipelining import PipeliningContender

CONTENDERS: dict[str, type[Contender]] = {
    contender.name: contender
    for contender in (
        RaymmContender,
        PipeliningContender,
        CompiledGraphContender,
        ActorCallsContender,
        LoopContender,
    )
}
RATIOS = {
    "raymm_over_torch_pipelining": PipeliningContender.name,
    "raymm_over_compiled_graph": CompiledGraphContender.name,
    "raymm_over_actor_calls": ActorCallsContender.name,
    "raymm_over_floor": LoopContender.name,
}
MESSAGE_BYTES = (64 * 2**10, 4 * 2**20)
MICROBATCHES = (8, 24)
COMPUTE_MS = (0.0, 1.0)
QUICK_MESSAGE_BYTES = (64 * 2**10,)
QUICK_MICROBATCHES = (8,)
WARM_UP_STEPS = 3
# The first step after the others' turns finds cold caches; it runs, and is not counted.
STEPS_PER_TURN = 3
RELATIVE_TOLERANCE = 1e-4


def check(contender: Contender, config: ChainConfig) -> None:
    """Run a step of `config` and compare loss and gradients with a single process's.

    Raises:
        AssertionError: where a number differs by more than RELATIVE_TOLERANCE.
    """
    contender.setup(config)
    contender.dispatch()
    compare(contender.name, contender.result(), config)


def compare(name: str, got: ChainResult, config: ChainConfig) -> None:
    """Raise AssertionError unless `got` is what `reference(config)` computes."""
    want = reference(config)
    pairs = zip(
        (got.loss, *got.weight_gradients), (want.loss, *want.weight_gradients), strict=True
    )
    if not all(math.isclose(a, b, rel_tol=RELATIVE_TOLERANCE) for a, b in pairs):
        raise AssertionError(f"{name} computed {got} for {config}, a single process {want}")


def measure(
    contenders: list[Contender], config: ChainConfig, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of every counted step of `config`, by contender, taken in turns."""
    for contender in contenders:
        contender.setup(config)
        for _ in range(WARM_UP_STEPS):
            contender.dispatch()
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        # Starting with another contender each round, so that none always follows the same one.
        shift = turn % len(contenders)
        for contender in contenders[shift:] + contenders[:shift]:
            steps = [contender.step() * 1e3 for _ in range(STEPS_PER_TURN)]
            times[contender.name] += steps[1:]
    for contender in contenders:
        compare(contender.name, contender.result(), config)
    return times


def run_grid(contenders: list[Contender], options: argparse.Namespace) -> list[dict]:
    """One row per grid point: what it is, each contender's median and quartiles in ms."""
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
            times = measure(contenders, config, options.rounds)
            rows.append(
                {
                    "compute_ms": compute_ms,
                    "message_bytes": message_bytes,
                    "microbatches": microbatches,
                    "median_ms": {n: round(statistics.median(t), 2) for n, t in times.items()},
                    "quartiles_ms": {
                        n: [round(q, 2) for q in statistics.quantiles(t, n=4)[::2]]
                        for n, t in times.items()
                    },
                }
            )
            out.print(f"[dim]{rows[-1]['median_ms']}  ({compute_ms:g} ms compute, "
                      f"{message_bytes // 1024} KB, {microbatches} microbatches)")
    return rows


def worst_ratios(rows: list[dict]) -> dict[str, float]:
    """The largest ratio of medians over the grid, for each pair in RATIOS that was measured."""
    result = {}
    for key, other in RATIOS.items():
        ratios = [
            row["median_ms"][RaymmContender.name] / row["median_ms"][other]
            for row in rows
            if {RaymmContender.name, other} <= row["median_ms"].keys()
        ]
        if ratios:
            result[key] = round(max(ratios), 3)
    return result


def table(rows: list[dict]) -> Table:
    """Medians, one line per grid point, one column per contender."""
    names = list(rows[0]["median_ms"])
    result = Table(title="ms per step, median (4 stages, forward + backward, 1F1B)")
    for heading in ("compute ms", "message KB", "microbatches", *names):
        result.add_column(heading, justify="right")
    for row in rows:
        point = f"{row['compute_ms']:g}", f"{row['message_bytes'] // 1024}", row["microbatches"]
        medians = (f"{row['median_ms'][name]:.1f}" for name in names)
        result.add_row(*map(str, point), *medians)
    return result


def arguments() -> argparse.Namespace:
    """The command line, checked."""
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
        "grid": rows,
        "rounds": options.rounds,
        "steps_per_round": STEPS_PER_TURN - 1,
        "seconds": round(time.perf_counter() - started, 1),
        "machine": described,
    }
    console().print(table(rows), {key: result[key] for key in RATIOS if key in result})
    emit(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
