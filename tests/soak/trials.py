"""Planned faults of a soak, and the table of their outcomes."""

from __future__ import annotations

import os
import random
import signal
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.soak.soak_places import (
    LIMITS,
    RANKS,
    SMALL_DISK,
    SNAPSHOT,
    STOPPED,
    WRITING,
    Place,
    places,
)

# Steps between two faults.
EVERY_VARIABLE = "RAYMM_SOAK_EVERY"
EVERY = int(os.environ.get(EVERY_VARIABLE, "3"))
# Parts of a soak, each a separate run, and their faults per hundred: with new processes instead of
# the lost ones, with a spare, with a driver that is restarted, and on several nodes.
PARTS = {"in place": 66, "with a spare": 15, "the same command": 10, "several nodes": 9}

# Messages about a checkpoint that was not written, or an older one that was not removed.
UNSAVED = ("could not be saved", "an old checkpoint could not be removed")
# Message of a second process about a driver that ended without one.
LAST_WORDS = "ended without reporting a cause"


@dataclass
class Trial:
    """Fault.

    Attributes:
        number: index of the trial.
        part: part of the soak.
        role: affected process: ``"rank 0"``, ``"spare"``, ``"data worker"``, ``"driver"``,
            ``"raylet"``, ``"node"``, ``"GCS"``, ``"agent"``.
        phase: phase of the role at the time.
        kind: kind of the fault.
        hits: number of occurrences.
        at, decided, recovered, new_step: times in seconds of the fault, of the driver's diagnosis,
            of the restored state, and of the first new step.
        redone: repeated steps.
        text: the driver's message.
        last_step: last step at the end of the trial.
        identical: True if all losses until the next trial equal an undisturbed run.
        spare: waiting spare process at the start, with a spare.
        spare_came: True if the spare has become a rank.
        ended_otherwise: exit code and message of a driver with an undocumented end.
    """

    number: int
    part: str
    role: str
    phase: str
    kind: str
    hits: int = 0
    at: float | None = None
    decided: float | None = None
    recovered: float | None = None
    new_step: float | None = None
    redone: int = 0
    text: str = ""
    last_step: int = 0
    identical: bool = False
    spare: int | None = None
    spare_came: bool = False
    ended_otherwise: str = ""

    @property
    def rank(self) -> int | None:
        """Return the index of a rank, or None."""
        return int(self.role[-1]) if self.role.startswith("rank") else None

    @property
    def unsaved(self) -> bool:
        """Return True if it prevents a checkpoint; the trial is over once another one is written.
        """
        if self.kind == "MemoryError":
            return self.phase in WRITING
        return self.kind in ("full disk", SMALL_DISK)

    @property
    def survives(self) -> bool:
        """Return True if the run must continue without a recovery."""
        return (
            self.kind in (STOPPED, "slow disk", "NaN input", *LIMITS) or self.role == "spare"
            or self.unsaved or self.kind == "MemoryError" and self.phase in SNAPSHOT
        )

    @property
    def takes_spare(self) -> bool:
        """Return True if a spare must replace a rank.

        A single spare waits: within a recovery two ranks are lost, and the first replacement may be
        lost with the second.
        """
        return self.part == "with a spare" and not self.survives and self.phase != "recovery"

    @property
    def ends_process(self) -> bool:
        """Return True if it ends the run's own process, and the same command resumes."""
        return self.part == "the same command" and not self.survives

    @property
    def documented_end(self) -> tuple[int, str]:
        """Return the exit code of a driver that it ends, and a pattern of its message."""
        return {
            "GCS": (1, r"server \(GCS\) at .* has not answered for"),
            "driver": (-signal.SIGKILL, LAST_WORDS),
        }.get(self.role, (1, rf"{LAST_WORDS}|does not listen|the Ray cluster has lost it"))

    @property
    def ends(self) -> int:
        """Return the number of ends of the run's own process; a fault at its start adds a second
        one.
        """
        return self.ends_process + (self.ends_process and self.phase == "start")

    @property
    def named(self) -> bool:
        """Return True if the driver named the culprit.

        It cannot name itself, nor its own node's raylet and GCS, as Ray ends it with those.
        """
        who = {
            "data worker": "data worker", "node": "node ",
            **{f"rank {n}": f"rank {n} " for n in range(RANKS)},
        }.get(self.role, "")
        if self.unsaved:
            return any(what in self.text for what in UNSAVED)
        if self.kind == "NaN input":
            who = "not applied"
        elif self.survives:
            return True
        return who in self.text


def draw(
    kills: int, seed: int, parts: Sequence[str] | None = None, kind: str | None = None
) -> list[Trial]:
    """Draw trials of all parts in random order.

    In each part, the least frequent roles, phases and kinds come first, and none is repeated before
    all occurred.

    Args:
        kills: number of trials.
        seed: seed of the order.
        parts: parts of all trials, in equal numbers; None for each part's share.
        kind: kind of all trials; None for any.
    """
    generator, trials = random.Random(seed), []
    counts = dict.fromkeys(PARTS, 0)
    shares = PARTS if parts is None else dict.fromkeys(parts, 100 // len(parts))
    counts |= {name: kills * share // 100 for name, share in shares.items()}
    counts[next(iter(shares))] += kills - sum(counts.values())
    seen: Counter[str] = Counter()
    for name, there in places().items():
        left: list[Place] = []
        for _ in range(counts[name]):
            if not left:
                left = [place for place in there if kind in (None, place.kind)]
                generator.shuffle(left)
            place = min(left, key=lambda each: sum(seen[word] for word in each))
            left.remove(place)
            seen.update(place)
            trials.append((name, *place))
    return [Trial(number, *trial) for number, trial in enumerate(trials)]


@dataclass
class Row:
    """Trials in one row of the table."""

    name: str
    trials: list[Trial] = field(default_factory=list)

    def cells(self) -> list[str]:
        """Return cells of the table: counts, and seconds as median and worst."""
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
    """Return rows by part, role, phase and kind, and for all."""
    grouped: dict[str, Row] = {}
    for key in ("part", "role", "phase", "kind"):
        for trial in trials:
            name = getattr(trial, key)
            grouped.setdefault(f"{key} {name}", Row(name)).trials.append(trial)
    return [*grouped.values(), Row("all", list(trials))]
