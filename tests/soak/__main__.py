"""``python -m tests.soak --kills N --seed S``: a small real run in which things go wrong, one after
the other, in every role and phase; and what became of each.

Prints a table (seconds as median and worst) and, last, a line of JSON. Ends with 1 if anything is
not as in an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDERS = [HERE, HERE.parent / "training", HERE.parent]
sys.path[:0] = [str(folder) for folder in FOLDERS]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_memory_monitor_refresh_ms"] = "0"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*map(str, FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def main() -> int:
    """Run it; 0 if all is as in an undisturbed run."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raymm-soak-", dir="/tmp") as folder:
        return soak(Path(folder), options.kills, options.seed)


def soak(folder: Path, kills: int, seed: int) -> int:
    """Both runs, and the table.

    Args:
        folder: for all of it.
        kills: how many things go wrong.
        seed: of the order.
    """
    from soak_faults import FOLDER

    os.environ[FOLDER] = str(folder)

    import ray
    from processes import descendants, titles  # pyright: ignore[reportMissingImports]
    from rich.console import Console
    from rich.table import Table
    from tiny_run import curve, prepare  # pyright: ignore[reportMissingImports]
    from trials import EVERY, HEADER, Soak, draw, noting_decisions, rows

    from raymm.monitor.metrics import read_metrics
    from raymm.runtime.embedded.embedded_ray import start_embedded_ray
    from raymm.runtime.embedded.forked_workers import start_servers

    start_servers(2, ["transformers.models.llama.modeling_llama"])
    start_embedded_ray(num_cpus=4, log_to_driver=False, object_store_memory=200 * 2**20)
    inputs = folder / "inputs"
    inputs.mkdir()
    prepare(inputs)
    trials = draw(kills, seed)
    steps = (kills + 1) * (EVERY + 6)
    whole = _run(inputs, folder / "whole", steps, [])
    watch = Soak(trials, folder)
    noting_decisions(watch)
    error = None
    try:
        _run(inputs, folder / "soaked", steps, [watch])
    except Exception as failure:  # the table says how far it came
        error = failure
    expected, losses = curve(whole), curve(folder / "soaked")
    starts = [0, *(trial.last_step for trial in trials)]
    for trial, start in zip(trials, starts, strict=False):
        span = slice(start, trial.last_step)
        trial.identical = trial.last_step > start and losses[span] == expected[span]
    samples = [read_metrics(run / "samples.jsonl") for run in (whole, folder / "soaked")]
    once = samples[0] == samples[1]
    ray.shutdown()
    left = titles(descendants(os.getpid())).values()
    orphans = sum("ray" in title.partition(" ")[0] for title in left)
    table = Table(*HEADER)
    for row in rows(trials):
        table.add_row(*row.cells())
    Console(width=140).print(table)
    over = [trial for trial in trials if trial.new_step is not None]
    for trial in trials:
        if trial.new_step is None or not trial.identical or not trial.named:
            print(f"not as it should be: {trial}")
    if error is not None:
        print(f"the run ended: {type(error).__name__}: {error}", *getattr(error, "__notes__", ()))
    summary = {
        "kills": kills, "seed": seed, "over": len(over),
        "bit_identical": sum(trial.identical for trial in over),
        "whole_run_identical": losses == expected, "samples_once": once,
        "named": sum(trial.named for trial in over),
        "most_steps_redone": max((trial.redone for trial in over), default=0),
        "processes_left": orphans,
    }
    print(json.dumps(summary))
    good = len(over) == kills and losses == expected and once
    return 0 if good and summary["named"] == kills else 1


def _run(inputs: Path, folder: Path, steps: int, callbacks: list[Any]) -> Path:
    from tiny_run import change, settings  # pyright: ignore[reportMissingImports]

    from raymm.config.build import build_model, build_plan
    from raymm.config.sections import parse_config
    from raymm.training.trainer import Trainer

    values = settings(inputs, folder, steps)
    for path, value in {
        "model.mask": "soak_faults:causal", "run.snapshot_every": 1, "run.max_recoveries": 10**6,
        "run.max_failures": 0, "run.timeout_s": 5, "run.checkpoint_every": 4, "run.eval_every": 4,
        "run.eval_shuffled": False, "run.eval_steps": 1, "run.log_samples": True,
        "run.log_every": 50, "data.heldout": str(inputs / "heldout.jsonl"),
    }.items():
        change(values, path, value)
    config = parse_config(values)
    model = build_model(config)
    Trainer(
        model, build_plan(config, model), config.data, config.run, callbacks=callbacks,
        optimizer=config.optimizer.build(steps), resources=config.resources.for_device,
    ).fit()
    return folder


if __name__ == "__main__":
    sys.exit(main())
