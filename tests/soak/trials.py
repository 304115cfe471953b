"""What is to go wrong in a soak, and what has become of it."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray._private.state

from raymm import Callback
from raymm.recovery.run_controller import RunController

RANKS = 2
PHASES = (
    "forward", "backward", "message", "reduction", "optimizer", "snapshot", "checkpoint",
    "evaluation", "recovery",
)
KINDS = ("SIGKILL", "MemoryError", "SIGSTOP", "SIGSTOP, SIGCONT")
# Where an error is raised, and not where it is only noticed by who waits for the result.
RAISES = ("forward", "backward", "message", "reduction", "optimizer", "evaluation")
# Steps between what goes wrong and the next such thing; checkpoints and evaluations are as often.
EVERY = 3
# Seconds until a process that was stopped goes on.
STOPPED_S = 1.5


@dataclass
class Trial:
    """One thing that goes wrong.

    Attributes:
        number: of the trial.
        rank: in which; None: in the data worker.
        phase: while it does what.
        kind: what goes wrong.
        at, decided, recovered, new_step: when it did, when the driver knew, when all had gone back,
            and when a step was taken that had not been taken before; seconds.
        redone: steps that were taken again.
        text: what the driver said of it.
        identical: whether all losses until the next trial are those of an undisturbed run.
    """

    number: int
    rank: int | None
    phase: str
    kind: str
    at: float | None = None
    decided: float | None = None
    recovered: float | None = None
    new_step: float | None = None
    redone: int = 0
    text: str = ""
    last_step: int = 0
    identical: bool = False

    @property
    def survives(self) -> bool:
        """Whether nothing is to be noticed of it."""
        return self.kind == "SIGSTOP, SIGCONT"

    @property
    def named(self) -> bool:
        """Whether the driver named the culprit."""
        who = "data worker" if self.rank is None else f"rank {self.rank} "
        return self.survives or who in self.text


def draw(kills: int, seed: int) -> list[Trial]:
    """Trials of all roles, phases and kinds in a random order, none twice before all were there."""
    places: list[tuple[int | None, str, str]] = [
        (rank, phase, kind)
        for rank in range(RANKS) for phase in PHASES for kind in KINDS
        if kind != "MemoryError" or phase in RAISES
    ]
    places += [(None, "loading", "SIGKILL")] * 3
    generator, drawn = random.Random(seed), []
    while len(drawn) < kills:
        generator.shuffle(places)
        drawn += places
    return [Trial(number, *place) for number, place in enumerate(drawn[:kills])]


class Soak(Callback):
    """Has things go wrong, one after the other, and notes what becomes of them.

    Args:
        trials: what; filled in.
        folder: where ranks look for it.
    """

    def __init__(self, trials: Sequence[Trial], folder: Path) -> None:
        self._left = list(trials)
        self._folder = folder
        self._now: Trial | None = None
        self._last = 0  # steps taken
        self._due = EVERY
        self.trials = list(trials)

    def on_step(self, row: Mapping[str, Any]) -> None:
        step = row["step"]
        if step <= self._last:
            return
        now, self._last = self._now, step
        if now is not None and self._is_over(now):
            now.new_step, now.last_step = time.time(), step
            self._now, self._due = None, step + EVERY
        if self._now is None and self._left and step >= self._due:
            self._begin(self._left.pop(0))

    def on_restart(self, restart: Any) -> None:
        now = self._now
        if now is None:
            return
        now.redone = max(now.redone, self._last - restart.run.first_step)
        now.recovered = time.time()

    def _begin(self, trial: Trial) -> None:
        self._now = trial
        if trial.rank is None:
            trial.at = time.time()
            os.kill(_pids("DataWorker")[0], signal.SIGKILL)
            return
        fault = {"number": trial.number, "rank": trial.rank, "phase": trial.phase,
                 "kind": trial.kind}
        (self._folder / "new.json").write_text(json.dumps(fault))
        (self._folder / "new.json").rename(self._folder / "fault.json")
        if trial.phase == "recovery":  # there has to be one, of the other rank
            os.kill(int((self._folder / f"rank-{1 - trial.rank}.pid").read_text()), signal.SIGKILL)
        if trial.survives:
            threading.Thread(target=self._wake, args=(trial,), daemon=True).start()

    def _wake(self, trial: Trial) -> None:
        while not self._taken(trial):
            time.sleep(0.05)
        time.sleep(STOPPED_S)
        os.kill(self._taken(trial)["pid"], signal.SIGCONT)
        trial.recovered = time.time()

    def _taken(self, trial: Trial) -> dict[str, Any]:
        file = self._folder / f"taken-{trial.number}.json"
        try:
            return json.loads(file.read_text())
        except (OSError, ValueError):
            return {}

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


def noting_decisions(soak: Soak) -> None:
    """Have the driver's controller say when it decides."""
    controller: Any = RunController
    decide = RunController.decide

    def decided(self: RunController, cause: Any, text: str, *args: Any) -> Any:
        soak.decided(text)
        return decide(self, cause, text, *args)

    controller.decide = decided


def _pids(kind: str) -> list[int]:
    return sorted(
        actor["Pid"] for actor in ray._private.state.actors().values()
        if actor["State"] == "ALIVE" and actor["ActorClassName"] == kind
    )


@dataclass
class Row:
    """Trials that are told together.

    Attributes:
        name: of them.
        trials: the trials.
    """

    name: str
    trials: list[Trial] = field(default_factory=list)

    def cells(self) -> list[str]:
        """Of the table: counts, and seconds as median and worst."""
        over = [trial for trial in self.trials if trial.new_step is not None]
        noticed = [trial for trial in over if not trial.survives]
        return [
            self.name, str(len(self.trials)), str(len(over)),
            _seconds([t.decided - t.at for t in noticed if t.decided and t.at]),
            f"{sum(trial.named for trial in over)}/{len(over)}",
            str(max((trial.redone for trial in over), default=0)),
            _seconds([t.new_step - t.decided for t in noticed if t.new_step and t.decided]),
            f"{sum(trial.identical for trial in over)}/{len(over)}",
        ]


HEADER = [
    "", "trials", "over", "detected s", "named", "redone", "to a new step s", "bit-identical",
]


def _seconds(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} ({max(values):.2f})"


def rows(trials: Sequence[Trial]) -> list[Row]:
    """By role, phase and kind, and all."""
    grouped: dict[str, Row] = {}
    for trial in trials:
        who = "data worker" if trial.rank is None else f"rank {trial.rank}"
        for name in (who, trial.phase, trial.kind, "all"):
            grouped.setdefault(name, Row(name)).trials.append(trial)
    everything = grouped.pop("all")
    return [*grouped.values(), everything]
