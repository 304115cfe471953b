"""Data workers beside torch's DataLoader: decoded and collated samples per second.

Pictures of many resolutions and spoken clips of the example's training data (`make train` prepares
them), decoded, tokenized and collated into steps of microbatches:

- `raymm`: `StepLoader`, Ray actors that leave tensors in the object store;
- `dataloader`: `torch.utils.data.DataLoader` with as many workers, the same function from a step's
  samples to its microbatches (`StepBuilder.build`), as many steps ahead.

Both take the same steps in turns, round after round, in one process that fetches every tensor; each
first works off what it prepared while it was idle. `raymm_over_dataloader` is the median over
rounds of the ratio of their rates; `cpu_ms_per_sample_*` what workers and this process took, which
a busy machine changes less.

    python -m benchmarks.data_loading --json
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from benchmarks import _common
from raymm.config import load_config
from raymm.data import DataConfig, StepBuilder, StepLoader, open_split, training_sampler

CONFIG = _common.REPOSITORY / "examples" / "alignment" / "stamps.yaml"
AHEAD = 2  # steps per worker, DataLoader's default
SETTLE_SECONDS = 1.0


class Steps(Dataset):
    """Steps as a map-style data set: element i is all microbatches of step i."""

    def __init__(self, config: DataConfig, indices: list) -> None:
        self.builder = StepBuilder(config, open_split(config, "train"))
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, step: int) -> list[dict]:
        return self.builder.build(self.indices[step]).microbatches


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors(one)


def samples_of(microbatches: Any) -> int:
    """Fetch every tensor; how many samples there are."""
    rows = 0
    for microbatch in microbatches:
        for tensor in tensors(microbatch):
            tensor.flatten()[:1].tolist()
        rows += len(microbatch["input_ids"])
    return rows


def raymm_steps(loader: StepLoader, workers: set[int]) -> Iterator[list[dict]]:
    """Microbatches of every step, fetched from the object store; notes workers' process ids."""
    import ray

    from raymm.data import join_parts

    for step in loader:
        if step.index < loader.config.num_workers:
            workers.add(ray.get(step.owner.pid.remote()))
        yield [
            join_parts({name: ray.get(ref) for name, ref in parts.items()})
            for parts in step.microbatches
        ]


def cpu_seconds(workers: set[int]) -> float:
    """Of this process and workers so far."""
    total = time.process_time()
    for pid in workers:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(
    steps: Iterator, workers: set[int], ahead: int, count: int
) -> tuple[float, float]:
    """Samples per second and CPU milliseconds per sample of `count` steps, after those that
    were ready."""
    for _ in islice(steps, ahead):
        pass
    start, cpu = time.perf_counter(), cpu_seconds(workers)
    samples = sum(samples_of(step) for step in islice(steps, count))
    seconds, cpu = time.perf_counter() - start, cpu_seconds(workers) - cpu
    return samples / seconds, 1000 * cpu / samples


def same(mine: list[dict], theirs: list[dict]) -> None:
    """Raise unless both are the same microbatches."""
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def compare(
    config: DataConfig, rounds: int, count: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Samples per second, and CPU milliseconds per sample, of both in every round."""
    ahead = AHEAD * config.num_workers
    total = 1 + (rounds + 1) * (count + ahead)
    sampler = training_sampler(config, open_split(config, "train"))
    indices = [samples for samples, _ in islice(sampler.batches(), total)]
    theirs = iter(DataLoader(
        Steps(config, indices), batch_size=None, shuffle=False, num_workers=config.num_workers,
        prefetch_factor=AHEAD, multiprocessing_context="spawn",
    ))
    workers = {"raymm": set(), "dataloader": {one.pid for one in active_children()}}
    with StepLoader(config, steps=total, sampler=sampler) as loader:
        sources = {"raymm": raymm_steps(loader, workers["raymm"]), "dataloader": theirs}
        same(next(sources["raymm"]), next(theirs))
        rates: dict[str, list[float]] = {name: [] for name in sources}
        cpu: dict[str, list[float]] = {name: [] for name in sources}
        for number in range(rounds + 1):
            for name in list(sources)[:: 1 if number % 2 else -1]:
                time.sleep(SETTLE_SECONDS)  # until the other has prepared what it may
                found = measure(sources[name], workers[name], ahead, count)
                if number:  # tokenizers, codecs and page caches are warm after the first
                    rates[name].append(found[0])
                    cpu[name].append(found[1])
    return rates, cpu


def main() -> None:
    options = _common.parser(__doc__.splitlines()[0])
    options.add_argument("--config", type=Path, default=CONFIG, help="whose data are read")
    options.add_argument("--workers", type=int, default=2, help="of both")
    options.add_argument("--rounds", type=int, default=8, help="of each")
    options.add_argument("--steps", type=int, default=20, help="of a round")
    options.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE")
    args = options.parse_args()
    config = load_config(args.config, args.set).data
    config = config.model_copy(
        update={"num_workers": args.workers, "prefetch_steps": AHEAD * args.workers}
    )
    with _common.local_ray(num_cpus=args.workers + 1):
        rates, cpu = compare(config, args.rounds, args.steps)
    ratios = [a / b for a, b in zip(rates["raymm"], rates["dataloader"], strict=True)]
    result = {
        "machine": _common.machine(),
        "workers": args.workers,
        "batch_size": config.batch_size,
        "raymm_over_dataloader": round(statistics.median(ratios), 4),
        "ratios": [round(one, 4) for one in ratios],
        **{f"samples_per_s_{k}": round(statistics.median(v), 1) for k, v in rates.items()},
        **{f"cpu_ms_per_sample_{k}": round(statistics.median(v), 2) for k, v in cpu.items()},
    }
    table = Table(f"samples/s, {args.workers} workers", "median", "lowest", "highest", "CPU ms")
    for name, found in rates.items():
        table.add_row(
            name, *(f"{one:.1f}" for one in (
                statistics.median(found), min(found), max(found), statistics.median(cpu[name])
            ))
        )
    _common.console().print(table)
    _common.emit(result, args.json)


if __name__ == "__main__":
    main()
