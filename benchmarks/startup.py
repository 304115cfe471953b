"""Claim: a run reaches its first step close to the minimum set by imports and Ray.

Run with `python -m benchmarks.startup --json`.

`raymm train` of a tiny model with two ranks and a data worker (the standard run of the tests)
alternates with the floor: one process that imports torch and transformers, starts Ray, and then as
many actors that each import torch. Both start their own Ray. `floor` imports the part of
transformers that all models need (`transformers.modeling_utils`); `bare` imports the package alone,
which loads most of itself lazily. `start_over_floor` and `start_over_bare` are medians over rounds
of the ratios. Parts of raymm: `imports` (until the driver has imported its dependencies), `ray` (an
embedded cluster), `ranks` (until all are built), `first_step` (data and step). `fresh` starts every
rank as Ray does it, without forking.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.table import Table

from benchmarks.shared import common

ROOT = Path(__file__).resolve().parents[1]
ACTORS = 3  # two ranks and a data worker
FLOOR = f"""
import json, sys, time
start = time.time()
import torch, transformers
if sys.argv[1] == "floor":
    import transformers.modeling_utils
imports = time.time()
import ray
ray.init(address="local", include_dashboard=False, logging_level="ERROR")
up = time.time()
class Empty:
    def __init__(self):
        import torch
    def ready(self):
        return True
actors = [ray.remote(num_cpus=0)(Empty).remote() for _ in range({ACTORS})]
ray.get([actor.ready.remote() for actor in actors])
end = time.time()
print(json.dumps({{"imports": imports - start, "ray": up - imports, "actors": end - up,
                   "total": end - start}}))
"""
# Same as `raymm train`, with timestamps.
RAYMM = """
import json, os, sys, time
start = time.time()
from raymm.runtime.embedded.forked_workers import start_servers_early
start_servers_early()
from raymm.callbacks.callback import Callback
from raymm.runtime import cluster
from raymm.training import trainer
from raymm.cli.main import main
marks = {"imports": time.time()}
connect = cluster.connect
def connected(*arguments, **more):
    marks["build"] = time.time()
    embedded = connect(*arguments, **more)
    marks["ray"] = time.time()
    return embedded
cluster.connect = connected
class Clock(Callback):
    def on_start(self, *arguments, **more):
        marks["ranks"] = time.time()
    def on_step(self, *arguments, **more):
        marks.setdefault("first_step", time.time())
known = trainer.run_callbacks
trainer.run_callbacks = lambda names, others: (*known(names, others), Clock())
code = main(["train", sys.argv[1]])
assert code == 0, code
parts, before = {}, start
for name, when in marks.items():
    parts[name], before = when - before, when
print(json.dumps({**parts, "total": before - start}))
"""


def seconds(code: str, *arguments: str, **variables: str) -> dict[str, float]:
    """Return the seconds per part that a new process prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    from tests.support.tiny_run import prepare, settings, write_config

    rows: dict[str, list[dict[str, float]]] = {"floor": [], "bare": [], "raymm": [], "fresh": []}
    with tempfile.TemporaryDirectory() as temporary:
        inputs = prepare(Path(temporary))
        for turn in range(args.rounds):
            for name, variables in (("raymm", {}), ("fresh", {"RAYMM_FRESH_WORKERS": "1"})):
                values = settings(inputs, inputs / f"{name}-{turn}", 1)
                values["optimizer"]["warmup_steps"] = 0
                config = write_config(values, inputs / f"{name}-{turn}.yaml")
                rows[name].append(seconds(RAYMM, config, **variables))
                print(name, rows[name][-1], file=sys.stderr)
            for name in ("floor", "bare"):
                rows[name].append(seconds(FLOOR, name))
                print(name, rows[name][-1], file=sys.stderr)
    parts = {
        name: {part: statistics.median(row[part] for row in found) for part in found[0]}
        for name, found in rows.items()
    }

    def over(name: str, floor: str) -> float:
        pairs = zip(rows[name], rows[floor], strict=True)
        return statistics.median(row["total"] / least["total"] for row, least in pairs)

    columns = (*parts["raymm"], "actors")
    table = Table("", *columns)
    for name, values in parts.items():
        table.add_row(name, *(f"{values[part]:.1f}" if part in values else "" for part in columns))
    common.console().print(table)
    common.emit({
        "rounds": args.rounds, "seconds": parts, "start_over_floor": over("raymm", "floor"),
        "start_over_bare": over("raymm", "bare"), "fresh_over_floor": over("fresh", "floor"),
        "machine": common.machine(),
    }, args.json)


if __name__ == "__main__":
    main()
