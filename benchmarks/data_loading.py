"""Claim: data workers decode and collate at least as fast as torch's DataLoader.

Run with `python -m benchmarks.data_loading --json`.

Pictures of many resolutions and spoken clips of the example's training data (prepared by `make
train`), decoded, tokenized and collated into steps of microbatches:

- `raymm`: `StepLoader`, Ray actors that leave tensors in the object store;
- `dataloader`: `torch.utils.data.DataLoader` with as many workers, the same function from a step's
  samples to its microbatches (`StepBuilder.build`), the same prefetch depth and environment.

Both load the same steps in alternating rounds, in one process that fetches every tensor (for
`raymm` all tensors of a step at once, as the call of a rank does). Each first consumes the steps
that it prefetched while idle. `raymm_over_dataloader` is the median over rounds of the ratio of
their rates. Rounds in which other processes took more than 5 % of the machine's time are repeated,
and count only if fewer than three rounds are quiet. `cpu_ms_per_sample_*` is the CPU time of this
process and its children (Ray's servers count for `raymm`), on which other work on the machine has
less effect.

`stall_share` is the data stall of the ranks in the example's main job: the driver's waiting time
for steps over the time of these steps, without the first, in which workers start.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from benchmarks.shared import common
from raymm.config.sections import load_config
from raymm.data import DataConfig, StepBuilder, StepLoader, open_split, training_sampler

CONFIG = common.REPOSITORY / "examples" / "alignment" / "stamps.yaml"
AHEAD = 2  # steps per worker, as DataLoader's default
SETTLE_SECONDS = 1.0
OTHERS_SHARE = 0.05  # share of the machine's time above which a round is repeated
ENOUGH_QUIET = 3  # rounds
TRAIN_SECONDS = 1200


class Steps(Dataset):
    """Map-style data set of steps: element i contains all microbatches of step i."""

    def __init__(self, config: DataConfig, indices: list) -> None:
        self.builder = StepBuilder(config, open_split(config, "train"))
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, step: int) -> list[dict]:
        return self.builder.build(self.indices[step]).microbatches


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors of nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors(one)


def samples_of(microbatches: Any) -> int:
    """Fetch every tensor and return the number of samples."""
    rows = 0
    for microbatch in microbatches:
        for tensor in tensors(microbatch):
            tensor.flatten()[:1].tolist()
        rows += len(microbatch["input_ids"])
    return rows


def raymm_steps(loader: StepLoader) -> Iterator[list[dict]]:
    """Yield the microbatches of every step, fetched from the object store."""
    import ray

    from raymm.data import join_parts

    for step in loader:
        fetched = iter(ray.get([ref for parts in step.microbatches for ref in parts.values()]))
        yield [join_parts({name: next(fetched) for name in parts}) for parts in step.microbatches]


def process_times() -> dict[int, tuple[int, float]]:
    """Return process id -> (parent id, CPU seconds so far)."""
    tick, found = os.sysconf("SC_CLK_TCK"), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has just ended
            continue
        found[int(path.parent.name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / tick
    return found


def machine_seconds() -> float:
    """Return the CPU seconds of all processes so far."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def descendants(times: dict[int, tuple[int, float]]) -> set[int]:
    """Return this process and all its descendants."""
    tree = {os.getpid()}
    while below := {pid for pid, (parent, _) in times.items() if parent in tree} - tree:
        tree |= below
    return tree


def cpu_seconds(without: set[int]) -> tuple[float, float]:
    """Return CPU seconds so far of this process with its descendants, and of all other processes.

    Args:
        without: descendants that count as other processes.
    """
    times = process_times()
    tree = descendants(times)
    mine = sum(times[pid][1] for pid in tree - without)
    return mine, machine_seconds() - sum(times[pid][1] for pid in tree)


@dataclass(frozen=True)
class Measured:
    """Samples per second, CPU milliseconds per sample, and the machine time of other processes."""

    rate: float
    cpu_ms: float
    others: float


def measure(steps: Iterator, not_mine: set[int], ahead: int, count: int) -> Measured:
    """Measure `count` steps after the prefetched ones.

    Args:
        not_mine: idle processes of the other contender.
    """
    for _ in islice(steps, ahead):
        pass
    before, start = cpu_seconds(not_mine), time.perf_counter()
    samples = sum(samples_of(step) for step in islice(steps, count))
    seconds, after = time.perf_counter() - start, cpu_seconds(not_mine)
    mine, others = (b - a for a, b in zip(before, after, strict=True))
    return Measured(samples / seconds, 1000 * mine / samples, others / seconds / os.cpu_count())


def same(mine: list[dict], theirs: list[dict]) -> None:
    """Raise an error unless both sets of microbatches are equal."""
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def compare(config: DataConfig, rounds: int, count: int) -> dict[str, list[Measured]]:
    """Alternate both loaders until enough rounds are quiet, or for three times as many rounds."""
    ahead = AHEAD * config.num_workers
    total = 1 + (3 * rounds + 1) * (count + ahead)
    sampler = training_sampler(config, open_split(config, "train"))
    indices = [samples for samples, _ in islice(sampler.batches(), total)]
    theirs = iter(DataLoader(
        Steps(config, indices), batch_size=None, shuffle=False, num_workers=config.num_workers,
        prefetch_factor=AHEAD, multiprocessing_context="spawn",
    ))
    their_workers = {one.pid for one in active_children()}
    with StepLoader(config, steps=total, sampler=sampler) as loader:
        sources = {"raymm": raymm_steps(loader), "dataloader": theirs}
        same(next(sources["raymm"]), next(theirs))
        rays = descendants(process_times()) - their_workers - {os.getpid()}
        found: dict[str, list[Measured]] = {name: [] for name in sources}
        for number in range(3 * rounds + 1):
            for name in list(sources)[:: 1 if number % 2 else -1]:
                time.sleep(SETTLE_SECONDS)  # until the other loader has filled its prefetch queue
                not_mine = their_workers if name == "raymm" else rays
                one = measure(sources[name], not_mine, ahead, count)
                if number:  # tokenizers, codecs and page caches are warm after the first
                    found[name].append(one)
            if len(quiet_rounds(found)) >= rounds:
                break
    return found


def quiet_rounds(found: dict[str, list[Measured]]) -> list[int]:
    """Return the indices of rounds without other load on the machine."""
    pairs = zip(*found.values(), strict=True)
    return [
        number for number, both in enumerate(pairs)
        if all(one.others <= OTHERS_SHARE for one in both)
    ]


def stall_share(config: Path, overrides: list[str], steps: int) -> float:
    """Return the driver's waiting time for data over the time of the steps of a training run."""
    with tempfile.TemporaryDirectory(prefix="raymm-stall-") as folder:
        settings = [
            *overrides, f"run.storage_path={folder}/run", f"run.steps={steps + 1}",
            f"run.checkpoint_every={steps + 1}", "run.eval_every=null",
        ]
        subprocess.run(
            [sys.executable, "-m", "raymm", "train", config.resolve(),
             *(part for one in settings for part in ("--set", one))],
            check=True, stdout=sys.stderr, cwd=common.REPOSITORY, timeout=TRAIN_SECONDS,
        )
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row][1:]
    return sum(row["data_wait_s"] for row in rows) / sum(row["seconds"] for row in rows)


def result_of(found: dict[str, list[Measured]]) -> dict[str, Any]:
    """Return the figures of the rounds that count."""
    quiet = quiet_rounds(found)
    rounds = quiet if len(quiet) >= ENOUGH_QUIET else range(len(found["raymm"]))
    kept = {name: [values[i] for i in rounds] for name, values in found.items()}
    both = list(zip(kept["raymm"], kept["dataloader"], strict=True))
    ratios = [one.rate / other.rate for one, other in both]
    return {
        "raymm_over_dataloader": round(statistics.median(ratios), 4),
        "cpu_raymm_over_dataloader": round(
            statistics.median(one.cpu_ms / other.cpu_ms for one, other in both), 4
        ),
        "ratios": [round(one, 4) for one in ratios],
        "quiet_rounds": len(quiet),
        "rounds": len(found["raymm"]),
        **{
            f"samples_per_s_{name}": round(statistics.median(one.rate for one in values), 1)
            for name, values in kept.items()
        },
        **{
            f"cpu_ms_per_sample_{name}": round(statistics.median(one.cpu_ms for one in values), 2)
            for name, values in kept.items()
        },
    }


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--config", type=Path, default=CONFIG, help="configuration with the data")
    options.add_argument("--workers", type=int, default=2, help="workers per loader")
    options.add_argument("--rounds", type=int, default=8, help="quiet rounds per loader")
    options.add_argument("--steps", type=int, default=30, help="steps per round")
    options.add_argument(
        "--train-steps", type=int, default=12, help="steps of the training run; 0 for none"
    )
    options.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE")
    args = options.parse_args()
    config = load_config(args.config, args.set).data
    config = config.model_copy(
        update={"num_workers": args.workers, "prefetch_steps": AHEAD * args.workers}
    )
    # raymm sets these for its workers; the workers of DataLoader inherit them.
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    with common.local_ray(num_cpus=args.workers + 1):
        found = compare(config, args.rounds, args.steps)
    result = {
        "machine": common.machine(),
        "workers": args.workers,
        "batch_size": config.batch_size,
        **result_of(found),
    }
    if args.train_steps:
        result["stall_share"] = round(stall_share(args.config, args.set, args.train_steps), 5)
    table = Table(f"{args.workers} workers", "samples/s", "CPU ms per sample")
    for name in found:
        table.add_row(
            name, f"{result[f'samples_per_s_{name}']}", f"{result[f'cpu_ms_per_sample_{name}']}"
        )
    common.console().print(table)
    common.emit(result, args.json)


if __name__ == "__main__":
    main()
