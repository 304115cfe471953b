"""Files on five roads through the code: a step, a plan, a save, a resume and a lost rank.

A tiny run (three stages of two modules on two ranks) is trained in processes that record their
calls; the files on a road are those whose functions are called meanwhile, in the driver, the ranks
and the data workers:

- step: the fourth step, without any other activity.
- save: the step after which the run is saved, without the files of a plain step.
- lost_rank: from the kill of a rank to the end of the repeated step, without the files of a plain
  step.
- resume: the start of a run from a checkpoint, without the files of a new start.
- plan: ``raymm plan`` for the same model.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.house import PACKAGES, ROOT, files, num_lines

FOLDERS = [ROOT / "tests" / "training", ROOT / "tests", ROOT]
LOG = "RAYMM_ROADS_LOG"
# Steps of the first run, and its events.
STEPS, CHECKPOINT_EVERY, PLAIN_STEP, KILL_AFTER = 12, 8, 4, 10


def roads() -> dict[str, list[str]]:
    """Return the files on each road, sorted.

    Raises:
        subprocess.CalledProcessError: a run failed; its output is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder)
        fresh = _recorded(inputs, "train", STEPS)
        resumed = _recorded(inputs, "train", STEPS + 2)
        plan = _recorded(inputs, "plan", STEPS)
    start, marks = fresh[1]["start"], fresh[1]
    step = _files(fresh, marks[f"step {PLAIN_STEP - 1}"], marks[f"step {PLAIN_STEP}"])
    return {
        "step": sorted(step),
        "save": sorted(
            _files(
                fresh, marks[f"step {CHECKPOINT_EVERY}"], marks[f"step {CHECKPOINT_EVERY + 1}"]
            ) - step
        ),
        "lost_rank": sorted(
            _files(fresh, marks["kill"], marks[f"step {KILL_AFTER + 1}"]) - step
        ),
        "resume": sorted(
            _files(resumed, resumed[1]["start"], resumed[1][f"step {STEPS + 1}"])
            - _files(fresh, start, marks["step 1"])
        ),
        "plan": sorted(_files(plan, 0.0, float("inf"))),
    }


def road_metrics(found: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return ``step_files``, ``step_lines``, ``plan_files`` and so on, and the lists of files."""
    return {
        **{f"{road}_files": len(names) for road, names in found.items()},
        **{f"{road}_lines": sum(map(num_lines, names)) for road, names in found.items()},
        "roads": dict(found),
    }


Recording = tuple[list[tuple[float, str]], dict[str, float]]


def _files(recording: Recording, first: float, last: float) -> set[str]:
    """Return the files that were called between two times, in seconds."""
    return {file for at, file in recording[0] if first <= at <= last}


def _recorded(inputs: Path, road: str, steps: int) -> Recording:
    """Run this file's :func:`_travel` in a process that records; return its calls and marks."""
    log, marks = inputs / f"{road}-{steps}.log", inputs / f"{road}-{steps}.json"
    paths = [ROOT / "tests" / "roads_recorder", *FOLDERS]
    environment = os.environ | {
        LOG: str(log), "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1",
        "RAYMM_ROADS_FOLDERS": os.pathsep.join(f"{ROOT / package}/" for package in PACKAGES),
    }
    subprocess.run(
        [sys.executable, "-m", "tests.house_roads", str(inputs), road, str(steps), str(marks)],
        env=environment, check=True, cwd=ROOT, stdout=subprocess.DEVNULL,
    )
    known = set(files())
    calls = []
    for line in log.read_text().splitlines():
        at, _, path, _ = line.split(" ", 3)
        if (file := str(Path(path).relative_to(ROOT))) in known:
            calls.append((float(at), file))
    return calls, json.loads(marks.read_text())


def _travel(inputs: Path, road: str, steps: int, marks_file: Path) -> None:
    """Train, or plan, and write the times of events."""
    from tests.support.tiny_run import (
        change,
        prepare,
        settings,
        write_config,
    )

    if not (inputs / "train.jsonl").exists():
        prepare(inputs)
    values = settings(inputs, inputs / "run", steps)
    for path, value in {
        "run.snapshot_every": 1, "run.checkpoint_every": CHECKPOINT_EVERY,
        "run.steps_in_flight": 1, "optimizer.total_steps": STEPS + 2,
    }.items():
        change(values, path, value)
    config = write_config(values, inputs / "config.yaml")
    marks = {"start": time.monotonic()}
    if road == "plan":
        from raymm.cli.main import main

        if main(["plan", config, "--ranks", "4", "--device", "h100"]):
            raise SystemExit("the plan failed")
    else:
        _train(values, marks)
    marks_file.write_text(json.dumps(marks))


def _train(values: dict[str, Any], marks: dict[str, float]) -> None:
    import ray

    from raymm.callbacks.callback import Callback
    from raymm.config.build import build_model, build_plan
    from raymm.config.sections import parse_config
    from raymm.training.trainer import Trainer

    class Marks(Callback):
        """Callback that records the time of every step's end; kills a rank once."""

        def on_step(self, row: Mapping[str, Any]) -> None:
            marks[f"step {row['step']}"] = time.monotonic()
            if row["step"] == KILL_AFTER and "kill" not in marks:
                marks["kill"] = time.monotonic()
                os.kill(_rank_process(), signal.SIGKILL)

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    config = parse_config(values)
    model = build_model(config)
    Trainer(
        model, build_plan(config, model), config.data, config.run, callbacks=[Marks()],
        optimizer=config.optimizer.build(config.run.steps),
        resources=config.resources.for_device,
    ).fit()


def _rank_process() -> int:
    """Return a process that, by the log, ran a step on a rank."""
    for line in Path(os.environ[LOG]).read_text().splitlines():
        if line.endswith(" RankActor.run_step"):
            return int(line.split(" ", 2)[1])
    raise SystemExit("no process has recorded RankActor.run_step")


if __name__ == "__main__":
    _travel(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
