"""Soak test ``python -m tests.soak --kills N --seed S``: faults in a small real run.

The faults occur one after the other, in every role and phase. There are separate runs: with new
processes instead of lost ones, with a spare, with a driver (and its Ray) that is ended and started
again, and on several nodes. Prints a table (seconds as median and worst) and, last, a line of JSON.
Exits with 1 if anything differs from an undisturbed run. ``--part`` runs only one of them, with all
of the trials (repeated: these, with an equal share of the trials each), ``--kind`` only one kind of
fault, ``--every`` sets the steps between faults, ``--draw`` draws losses, faults and throughput,
and ``--folder`` keeps logs and runs in a new folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.soak.soak_checks import (
    not_as_it_should_be,
    other_heldout_losses,
    other_losses,
    other_samples,
    other_steps_not_finite,
)
from tests.soak.soak_files import FOLDER, write_json
from tests.soak.soak_places import KINDS, SMALL_DISK, left_out
from tests.soak.soaked_run import UNDISTURBED
from tests.soak.trials import (
    EVERY,
    EVERY_VARIABLE,
    HEADER,
    PARTS,
    Trial,
    draw,
    rows,
)
from tests.support.small_disk import mounted

# Mean steps per trial, including waits for checkpoints, and additional steps of the longest one.
MORE_STEPS, LONGEST = 5, 20
# Seconds that processes of a run may take to end after it.
END_S = 20.0


def main() -> int:
    """Run the soak; return 0 if all results equal an undisturbed run."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=list(PARTS), action="append", dest="parts")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--every", type=int, default=EVERY, help="steps between two")
    parser.add_argument("--draw", type=Path, metavar="FILE")
    parser.add_argument("--folder", type=Path, help="of logs and runs, which are kept then")
    options = parser.parse_args()
    os.environ[EVERY_VARIABLE] = str(options.every)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unmounts its disks
    trials = draw(options.kills, options.seed, options.parts, options.kind)
    temporary = tempfile.TemporaryDirectory(prefix="raymm-soak-", dir="/tmp")
    with temporary if options.folder is None else nullcontext(options.folder) as folder:
        Path(folder).mkdir(exist_ok=True)
        with SoakRun(Path(folder).resolve(), trials, options.every + MORE_STEPS) as soak:
            return soak.run(options.draw)


class SoakRun:
    """All parts of a soak.

    Args:
        folder: folder of all files.
        trials: trials of all parts.
        steps: steps per trial.
    """

    def __init__(self, folder: Path, trials: Sequence[Trial], steps: int) -> None:
        self._folder = folder
        self._of_part = {
            part: [trial for trial in trials if trial.part == part]
            for part in PARTS if any(trial.part == part for trial in trials)
        }
        longest = max(map(len, self._of_part.values()))
        self._steps = longest * steps + LONGEST
        self._notes: list[str] = []
        self._disks = ExitStack()

    def __enter__(self) -> SoakRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._disks.close()

    def run(self, picture: Path | None = None) -> int:
        """Run all parts and report the outcomes; return 0 if all succeeded.

        Args:
            picture: file for a picture of all parts and the undisturbed run.
        """
        from tests.support.tiny_run import curve, prepare

        (self._folder / "inputs").mkdir()
        prepare(self._folder / "inputs")
        whole = self._start(UNDISTURBED)
        if whole.wait():
            print(self._log(UNDISTURBED))
            return 1
        expected = curve(self._folder / UNDISTURBED / "run")
        trials, alike = [], True
        for part, there in self._of_part.items():
            self._run_part(part, there)
            done = self._done(part)
            alike &= self._compare(part, done, expected)
            trials += done
        good = self._tell(trials, alike)
        if picture is not None and any(trial.at is not None for trial in trials):
            from tests.soak.soak_picture import draw_soak

            draw_soak(self._folder, UNDISTURBED, trials, picture)
        return 0 if good else 1

    def _start(self, part: str) -> subprocess.Popen:
        own = self._folder / part
        own.mkdir(exist_ok=True)
        with open(own / "log", "a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.soak.soaked_run", str(self._folder), part,
                 str(self._steps)],
                stdout=log, stderr=subprocess.STDOUT, env={**os.environ, FOLDER: str(own)},
            )

    def _log(self, part: str) -> str:
        return (self._folder / part / "log").read_text()[-6000:]

    def _run_part(self, part: str, trials: Sequence[Trial]) -> None:
        (self._folder / part).mkdir()
        if any(trial.kind == SMALL_DISK for trial in trials):
            self._disks.enter_context(mounted(self._folder / part / "run", "32m"))
        self._write(part, trials)
        ends = 1 + sum(trial.ends for trial in trials)
        log = self._folder / part / "log"
        for _ in range(ends):
            begin = log.stat().st_size if log.exists() else 0
            code = self._start(part).wait()
            ended = time.time()
            if code == 0:
                return
            done = self._done(part)
            under_way = next((t for t in done if t.at is not None and t.new_step is None), None)
            if under_way is None or not under_way.ends_process:
                break
            under_way.decided = under_way.decided or ended
            expected, said = under_way.documented_end
            deadline = time.monotonic() + END_S  # a second process prints after the driver's end
            while not (found := re.search(said.encode(), log.read_bytes()[begin:])):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.2)
            if code != expected or not found:
                under_way.ended_otherwise = f"code {code}, {found}"
            self._write(part, done)
        self._notes.append(f"{part}: the run ended\n{self._log(part)}")

    def _write(self, part: str, trials: Sequence[Trial]) -> None:
        write_json(self._folder / part / "trials.json", [asdict(trial) for trial in trials])

    def _done(self, part: str) -> list[Trial]:
        text = (self._folder / part / "trials.json").read_text()
        return [Trial(**values) for values in json.loads(text)]

    def _compare(self, part: str, trials: Sequence[Trial], expected: list[Any]) -> bool:
        """Return True if losses and samples of a part equal the undisturbed run."""
        from raymm.monitor.metrics import read_metrics
        from tests.support.tiny_run import curve

        whole, run = (self._folder / each / "run" for each in (UNDISTURBED, part))
        losses = curve(run) if (run / "metrics.jsonl").exists() else []
        starts = [0, *(trial.last_step for trial in trials)]
        for trial, start in zip(trials, starts, strict=False):
            span = slice(start, trial.last_step)
            trial.identical = trial.last_step > start and losses[span] == expected[span]
        self._write(part, trials)
        wrong = [other_losses(losses, expected)]
        if losses:
            rows, of_whole = (read_metrics(each / "metrics.jsonl") for each in (run, whole))
            samples = [read_metrics(each / "samples.jsonl") for each in (run, whole)]
            wrong += [
                other_samples(*samples, len(losses)), other_steps_not_finite(rows),
                other_heldout_losses(rows, of_whole),
            ]
        wrong = list(filter(None, wrong))
        self._notes += [f"{part}: {what}" for what in wrong]
        return not wrong

    def _tell(self, trials: Sequence[Trial], alike: bool) -> bool:
        from rich.console import Console
        from rich.table import Table

        from raymm.monitor.metrics import read_metrics

        table = Table(*HEADER)
        for row in rows(trials):
            table.add_row(*row.cells())
        Console(width=140).print(table)
        over = [trial for trial in trials if trial.new_step is not None]
        wrong = [(why, trial) for trial in trials if (why := not_as_it_should_be(trial))]
        for why, trial in wrong:
            print(f"not as it should be, {', '.join(why)}: {trial}")
        print("not drawn, as they cannot be:")
        for reason, which in left_out().items():
            print(f"  {reason}: {'; '.join(which)}")
        print(*self._notes, sep="\n")
        not_finite = [
            row["step"] for part in self._of_part
            for row in read_metrics(self._folder / part / "run" / "metrics.jsonl")
            if "not_applied" in row
        ]
        summary = {
            "kills": len(trials), "over": len(over),
            "bit_identical": sum(trial.identical for trial in over),
            "losses_and_samples_as_without": alike,
            "named": sum(trial.named for trial in over),
            "spares_due": sum(trial.takes_spare for trial in trials),
            "spares_came": sum(trial.spare_came for trial in over if trial.takes_spare),
            "most_steps_redone": max(
                (trial.redone for trial in over if not trial.ends_process), default=0
            ),
            "steps_not_finite": len(not_finite), "processes_left": self._processes_left(),
        }
        print(json.dumps(summary))
        return bool(trials) and alike and not (
            wrong or summary["processes_left"] or self._notes
        )

    def _processes_left(self) -> int:
        """Return the number of remaining processes of the runs, which have all ended."""
        deadline = time.monotonic() + END_S
        while (left := self._of_runs()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return left

    def _of_runs(self) -> int:
        mark, count = f"{FOLDER}={self._folder}".encode(), 0
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                count += mark in environment.read_bytes()
            except OSError:
                continue
        return count


if __name__ == "__main__":
    sys.exit(main())
