"""Callback that causes faults in a run, one after the other, and records their outcomes."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from raymm import Callback
from raymm.actors.rank.rank_group import RankGroup
from raymm.recovery.run_controller import RunController
from raymm.training.training_loop import RunCheckpoints
from tests.soak.soak_files import FAULT, RANKS_SO_FAR, SLOW_DISK_S, write_json
from tests.soak.soak_places import FILES, LIMITS, RANKS, SMALL_DISK, STOPPED
from tests.soak.trials import EVERY, UNSAVED, Trial
from tests.support.processes import descendants, titles
from tests.support.small_disk import SmallDisk

# Seconds until a stopped process continues.
STOPPED_S = 1.5
# Seconds that a spare may take to be ready before a fault.
WARM_S = 60.0
# Python's audit events of file operations; on a full disk, of those that create files.
OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}
MAKES, WRITES = {"os.rename", "os.mkdir"}, os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Times(Callback):
    """Callback that records the times of steps.

    Args:
        file: file for a line ``step:seconds`` per step.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_step(self, row: Mapping[str, Any]) -> None:
        with open(self._file, "a") as file:
            file.write(f"{row['step']}:{time.time()}\n")


class Soak(Callback):
    """Callback that causes the trials in this process's run.

    Args:
        trials: trials; their outcomes are filled in.
        folder: folder where ranks find the next fault, and where outcomes are written.
        end: ends the run, once all trials are over.
        nodes: nodes of the cluster, if there are several.
    """

    def __init__(
        self, trials: Sequence[Trial], folder: Path, end: Callable[[], None],
        nodes: Any = None,
    ) -> None:
        self.trials, self._folder, self._end, self._nodes = trials, folder, end, nodes
        self._left = [trial for trial in trials if trial.new_step is None]
        self._now: Trial | None = None
        if self._left and self._left[0].at is not None:  # this process was restarted
            self._now = self._left.pop(0)
        # Finished steps, including those of earlier processes.
        self._last = max((trial.last_step for trial in trials), default=0)
        self._due = self._last + EVERY
        self.group: Any = None
        self._disk = SmallDisk(folder / "run")
        self._operations: int | None = None  # file operations until the fault
        sys.addaudithook(self._audit)
        _note(self)

    def on_start(self, run: Any) -> None:
        if self._now is not None and self._now.phase == "start" and self._now.hits < 2:
            self._end_process(self._now)
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
            if now.kind == "NaN input" and "not_applied" in row:
                now.at = now.recovered = time.time()
                now.text += f"step {step} was not applied"
            now.last_step = step
            if self._is_over(now):
                now.new_step = time.time()
                if now.spare is not None:
                    ranks = (self._folder / RANKS_SO_FAR).read_text().split()
                    now.spare_came = str(now.spare) in ranks
                self._now, self._due = None, step + EVERY
                self.write()
                if now.role == "node":  # Ray requires the main thread to add one
                    self._nodes.add()
        if self._now is None and step >= self._due:
            if not self._left:
                self._end()
            elif self._left[0].kind not in FILES or self._committed():  # there is one to change
                self._begin(self._left.pop(0))

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        if self._now is not None and (self._now.role, self._now.phase) == ("driver", "evaluation"):
            self._hit_driver(self._now)

    def on_checkpoint(self, checkpoint: Any) -> None:
        now = self._now
        if now is None or now.kind == SMALL_DISK and not now.named:  # from before the disk was full
            return
        if now.unsaved and self._hit(now):  # it saves again
            now.recovered = time.time()

    def write(self) -> None:
        """Write the outcomes of all trials."""
        write_json(self._folder / "trials.json", [asdict(trial) for trial in self.trials])

    def _begin(self, trial: Trial) -> None:
        self._now, trial.last_step = trial, self._last
        if trial.part == "with a spare":
            deadline = time.monotonic() + WARM_S
            while trial.spare is None and time.monotonic() < deadline:
                self.group.look_after()
                time.sleep(0.2)
                if self.group.has_spare():
                    with suppress(ray.exceptions.RayError):  # killed, and not yet detected
                        trial.spare = self._spare()
        begin = {
            "spare": lambda: self._signal(trial, self._spare()),
            "driver": lambda: self._driver(trial),
            "raylet": lambda: self._signal(trial, _server("raylet/raylet")),
            "GCS": lambda: self._signal(trial, _server("gcs/gcs_server")),
            "agent": lambda: self._signal(trial, _server("ray::DashboardAgent")),
            "node": lambda: self._node(trial),
        }.get(trial.role, lambda: self._actor(trial, trial.role, trial.kind))
        if trial.kind in LIMITS:
            self._limit(trial)
        else:
            begin()

    def _limit(self, trial: Trial) -> None:
        """Take a resource from a process, and return it later."""
        if trial.rank is None:
            pid = _server("ray::DataWorker")
        else:
            pid = int((self._folder / f"rank-{trial.rank}.pid").read_text())
        limit, value = resource.RLIMIT_NOFILE, 3
        # a stack needs 8 MiB of address space; root has no thread limit
        if trial.kind == "no threads":
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
            limit, value = resource.RLIMIT_AS, pages * resource.getpagesize() + 2**20
        before = resource.prlimit(pid, limit)
        trial.at, trial.hits = time.time(), trial.hits + 1
        resource.prlimit(pid, limit, (value, before[1]))

        def give_back() -> None:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, limit, before)
            trial.recovered = time.time()

        threading.Timer(STOPPED_S, give_back).start()

    def _committed(self) -> list[Path]:
        """Return the checkpoints that are not links, the newest last."""
        manifests = self._folder.glob("run/checkpoints/step-*[0-9]/manifest.json")
        return sorted(file.parent for file in manifests
                      if file.is_file() and not file.parent.is_symlink())

    def _change_files(self, trial: Trial) -> None:
        """Change the checkpoints as another user may, and exit."""
        newest = self._committed()[-1]
        if trial.kind == "linked checkpoint":
            target = self._folder / f"moved-{trial.number}"
            newest.rename(target)
            newest.symlink_to(target)
        else:
            folder = newest.with_name(f"step-{99_000_000 + trial.number}")
            folder.mkdir()
            os.mkfifo(folder / "manifest.json")
        self._end_process(trial)

    def _actor(self, trial: Trial, role: str, kind: str) -> None:
        if kind == "NaN input":  # the next one occurs by itself
            return
        fault = {"number": trial.number, "role": role, "phase": trial.phase, "kind": kind}
        write_json(self._folder / FAULT, fault)
        if trial.phase in ("recovery", "start"):  # an earlier fault is required
            rank = int(role[-1])
            self._kill_rank(rank if trial.phase == "start" else 1 - rank)
        if trial.survives:
            threading.Thread(target=self._outlive, args=(trial,), daemon=True).start()

    def _kill_rank(self, rank: int) -> None:
        os.kill(int((self._folder / f"rank-{rank}.pid").read_text()), signal.SIGKILL)

    def _signal(self, trial: Trial, pid: int) -> None:
        trial.at = time.time()
        trial.hits += 1
        self.write()  # this process may be ended by it
        os.kill(pid, getattr(signal, trial.kind.partition(",")[0]))
        if trial.survives:
            trial.recovered = trial.at
            if trial.kind != "SIGKILL":  # a stopped process would outlive the soak
                threading.Timer(STOPPED_S, os.kill, (pid, signal.SIGCONT)).start()

    def _spare(self) -> int:
        (spare,) = self.group._spares._waiting
        place: Any = ray.get(spare.actor.describe.remote(), timeout=WARM_S)
        return place["pid"]

    def _node(self, trial: Trial) -> None:
        if trial.phase == "between steps":
            trial.at = time.time()
            self._nodes.kill()
        else:  # of the rank's node, which kills the node
            self._actor(trial, f"rank {trial.number % RANKS}", "node")

    def _driver(self, trial: Trial) -> None:
        if trial.kind in FILES:
            self._change_files(trial)
        elif trial.kind == SMALL_DISK:
            trial.at, trial.hits = time.time(), trial.hits + 1
            self._disk.fill()
        elif trial.phase in ("between steps", "start"):
            self._hit_driver(trial)
        elif trial.phase == "recovery":
            self._kill_rank(trial.number % RANKS)
        elif trial.phase != "evaluation":
            self._operations = int(trial.phase.rpartition(" ")[2])

    def _audit(self, event: str, args: Sequence[Any]) -> None:
        """Cause a fault at one of the file operations of a checkpoint."""
        if self._operations is None or event not in OPERATIONS or "checkpoints" not in str(args[0]):
            return
        assert self._now is not None
        makes = event in MAKES or event == "open" and args[2] & WRITES
        if self._now.kind == "full disk" and not makes:
            return
        if self._operations:
            self._operations -= 1
            return
        self._operations = None
        self._hit_driver(self._now)

    def _hit_driver(self, trial: Trial) -> None:
        if trial.kind == "SIGKILL":
            return self._end_process(trial)
        trial.at, trial.hits = time.time(), trial.hits + 1
        if trial.kind == "full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if trial.kind == "slow disk":
            time.sleep(SLOW_DISK_S)
        else:
            wake = f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        trial.recovered = time.time()

    def _end_process(self, trial: Trial) -> None:
        trial.at, trial.hits = time.time(), trial.hits + 1
        self.write()
        os.kill(os.getpid(), signal.SIGKILL)

    def _outlive(self, trial: Trial) -> None:
        while not self._hit(trial):
            time.sleep(0.05)
        if trial.kind == STOPPED:
            time.sleep(STOPPED_S)
            os.kill(self._taken(trial)["pid"], signal.SIGCONT)
        if not trial.unsaved:
            trial.recovered = time.time()

    def _hit(self, trial: Trial) -> bool:
        """Return True if the fault has occurred."""
        if trial.at is None and "at" in (taken := self._taken(trial)):
            trial.at, trial.hits = taken["at"], 1
        return trial.at is not None

    def _taken(self, trial: Trial) -> dict[str, Any]:
        file = self._folder / f"taken-{trial.number}.json"
        try:
            taken = json.loads(file.read_text())
        except (OSError, ValueError):
            return {}
        return taken if "at" in taken else {}

    def _is_over(self, trial: Trial) -> bool:
        return self._hit(trial) and trial.recovered is not None and (
            trial.recovered >= (trial.at or 0.0)
        )

    def decided(self, text: str) -> None:
        """Record that the driver has diagnosed the fault, also within a recovery."""
        if self._now is not None:
            self._now.decided = time.time()
            self.said(text)
            if (self._now.role, self._now.phase) == ("driver", "recovery"):
                self._end_process(self._now)

    def said(self, text: str) -> None:
        """Record a line of the run's output."""
        if self._now is not None:
            self._now.text += f"{text}\n"
            self.write()
            if self._now.kind == SMALL_DISK and self._now.named:
                with suppress(FileNotFoundError):
                    self._disk.empty()


def _note(soak: Soak) -> None:
    """Patch the driver's controller to report decisions, and its group to report its start."""
    controller: Any = RunController
    decide, start, make = RunController.decide, RankGroup.__init__, RunCheckpoints.__init__

    def decided(self: RunController, cause: Any, text: str, *args: Any) -> Any:
        soak.decided(text)
        return decide(self, cause, text, *args)

    def started(self: RankGroup, *args: Any, **options: Any) -> None:
        soak.group = self
        start(self, *args, **options)

    def made(self: RunCheckpoints, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        say = self._say

        def said(text: str) -> None:
            if any(what in text for what in UNSAVED):
                soak.said(text)
            say(text)

        self._say = said

    checkpoints: Any = RunCheckpoints
    checkpoints.__init__ = made
    controller.decide = decided
    group: Any = RankGroup
    group.__init__ = started


def _server(title: str) -> int:
    """Return the server process of this process's own Ray."""
    processes = titles(descendants(os.getpid()))
    return next(pid for pid, text in processes.items() if title in text.partition(" ")[0])
