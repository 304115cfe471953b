"""Has things go wrong in a run, one after the other, and notes what becomes of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray._private.state
from processes import descendants, titles  # pyright: ignore[reportMissingImports]
from trials import EVERY, Trial

from raymm import Callback
from raymm.actors.rank.rank_group import RankGroup
from raymm.recovery.run_controller import RunController

# Seconds until a process that was stopped goes on.
STOPPED_S = 1.5
# Seconds that a spare may take to be warm, which what goes wrong waits for.
WARM_S = 60.0
# Python's audit events of what touches files.
OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}


class Times(Callback):
    """Notes when steps are taken.

    Args:
        file: gets a line ``step:seconds`` of each.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_step(self, row: Mapping[str, Any]) -> None:
        with open(self._file, "a") as file:
            file.write(f"{row['step']}:{time.time()}\n")


class Soak(Callback):
    """Has trials happen in this process's run.

    Args:
        trials: what; filled in.
        folder: where ranks look for it, and where this writes what became of them.
        end: ends the run, once all are over.
        kill_node: kills a node with a rank, and adds another one.
    """

    def __init__(
        self, trials: Sequence[Trial], folder: Path, end: Callable[[], None],
        kill_node: Callable[[], None] = lambda: None,
    ) -> None:
        self.trials, self._folder, self._end, self._kill_node = trials, folder, end, kill_node
        self._left = [trial for trial in trials if trial.new_step is None]
        self._now: Trial | None = None
        if self._left and self._left[0].at is not None:  # this process is started anew
            self._now = self._left.pop(0)
        # Steps taken, in processes before this one, too.
        self._last = max((trial.last_step for trial in trials), default=0)
        self._due = self._last + EVERY
        self.group: Any = None
        self._operations: int | None = None  # of files, until this process ends
        self._in_evaluation = False
        _note(self)

    def on_start(self, run: Any) -> None:
        self._goes_back_to(run.first_step)

    def on_restart(self, restart: Any) -> None:
        self._goes_back_to(restart.run.first_step)

    def _goes_back_to(self, step: int) -> None:
        if self._now is not None:
            self._now.redone = max(self._now.redone, self._last - step)
            self._now.recovered = time.time()

    def on_step(self, row: Mapping[str, Any]) -> None:
        step = row["step"]
        if step <= self._last:
            return
        now, self._last = self._now, step
        if now is not None:
            now.last_step = step
            if self._is_over(now):
                now.new_step = time.time()
                self._now, self._due = None, step + EVERY
                self.write()
        if self._now is None and step >= self._due:
            if self._left:
                self._begin(self._left.pop(0))
            else:
                self._end()

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        if self._now is not None and self._now.phase == "evaluation" and self._in_evaluation:
            self._end_process(self._now)

    def write(self) -> None:
        """What is known of all trials."""
        texts = json.dumps([asdict(trial) for trial in self.trials])
        (self._folder / ".trials.json").write_text(texts)
        (self._folder / ".trials.json").rename(self._folder / "trials.json")

    def _begin(self, trial: Trial) -> None:
        self._now, trial.last_step = trial, self._last
        if trial.part == "with a spare":
            deadline = time.monotonic() + WARM_S
            while not self.group.has_spare() and time.monotonic() < deadline:
                time.sleep(0.05)
        begin = {
            "data worker": lambda: self._signal(trial, _pids("DataWorker")[0]),
            "spare": lambda: self._signal(trial, self._spare()),
            "driver": lambda: self._driver(trial),
            "raylet": lambda: self._signal(trial, _server("raylet/raylet")),
            "GCS": lambda: self._signal(trial, _server("gcs/gcs_server")),
            "node": lambda: self._node(trial),
        }.get(trial.role, lambda: self._rank(trial))
        begin()

    def _rank(self, trial: Trial) -> None:
        assert trial.rank is not None
        fault = {"number": trial.number, "rank": trial.rank, "phase": trial.phase,
                 "kind": trial.kind}
        (self._folder / "new.json").write_text(json.dumps(fault))
        (self._folder / "new.json").rename(self._folder / "fault.json")
        if trial.phase in ("recovery", "start"):  # there has to be one
            victim = trial.rank if trial.phase == "start" else 1 - trial.rank
            os.kill(int((self._folder / f"rank-{victim}.pid").read_text()), signal.SIGKILL)
        if trial.survives:
            threading.Thread(target=self._outlive, args=(trial,), daemon=True).start()

    def _signal(self, trial: Trial, pid: int) -> None:
        trial.at = time.time()
        self.write()  # this process may end by it
        os.kill(pid, getattr(signal, trial.kind.partition(",")[0]))
        if trial.survives:
            trial.recovered = trial.at
            if trial.kind != "SIGKILL":  # one that is stopped would outlive the soak
                threading.Timer(STOPPED_S, os.kill, (pid, signal.SIGCONT)).start()

    def _spare(self) -> int:
        (spare,) = self.group._spares._waiting
        place: Any = ray.get(spare.actor.describe.remote(), timeout=WARM_S)
        return place["pid"]

    def _node(self, trial: Trial) -> None:
        trial.at = time.time()
        self._kill_node()

    def _driver(self, trial: Trial) -> None:
        if trial.phase == "between steps":
            self._end_process(trial)
        elif trial.phase == "evaluation":
            self._in_evaluation = True
        else:
            self._operations = int(trial.phase.rpartition(" ")[2])
            sys.addaudithook(self._audit)

    def _audit(self, event: str, args: Sequence[Any]) -> None:
        """Ends this process at one of the operations on files of a checkpoint."""
        if self._operations is None or event not in OPERATIONS or "checkpoints" not in str(args[0]):
            return
        if self._operations:
            self._operations -= 1
            return
        self._operations = None
        assert self._now is not None
        self._end_process(self._now)

    def _end_process(self, trial: Trial) -> None:
        trial.at = time.time()
        self.write()
        os.kill(os.getpid(), signal.SIGKILL)

    def _outlive(self, trial: Trial) -> None:
        while not (taken := self._taken(trial)):
            time.sleep(0.05)
        trial.at = taken["at"]
        if trial.kind.startswith("SIGSTOP"):
            time.sleep(STOPPED_S)
            os.kill(taken["pid"], signal.SIGCONT)
        trial.recovered = time.time()

    def _taken(self, trial: Trial) -> dict[str, Any]:
        file = self._folder / f"taken-{trial.number}.json"
        try:
            taken = json.loads(file.read_text())
        except (OSError, ValueError):
            return {}
        return taken if "at" in taken else {}

    def _is_over(self, trial: Trial) -> bool:
        if trial.rank is not None and trial.at is None:
            trial.at = self._taken(trial).get("at")
        return trial.at is not None and trial.recovered is not None and (
            trial.recovered >= trial.at
        )

    def decided(self, text: str) -> None:
        """The driver knows, and says who it was; of what happens within a recovery, too."""
        if self._now is not None:
            self._now.decided = time.time()
            self._now.text += f"{text}\n"
            self.write()


def _note(soak: Soak) -> None:
    """Have the driver's controller say when it decides, and its group that it is there."""
    controller: Any = RunController
    decide, start = RunController.decide, RankGroup.__init__

    def decided(self: RunController, cause: Any, text: str, *args: Any) -> Any:
        soak.decided(text)
        return decide(self, cause, text, *args)

    def started(self: RankGroup, *args: Any, **options: Any) -> None:
        soak.group = self
        start(self, *args, **options)

    controller.decide = decided
    group: Any = RankGroup
    group.__init__ = started


def _pids(kind: str) -> list[int]:
    return sorted(
        actor["Pid"] for actor in ray._private.state.actors().values()
        if actor["State"] == "ALIVE" and actor["ActorClassName"] == kind
    )


def _server(title: str) -> int:
    """Of this process's own Ray."""
    processes = titles(descendants(os.getpid()))
    return next(pid for pid, text in processes.items() if title in text.partition(" ")[0])
