"""What is to go wrong in a soak, and the table of what has become of it."""

from __future__ import annotations

import os
import random
import signal
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from soak_places import LIMITS, RANKS, SMALL_DISK, SNAPSHOT, STOPPED, WRITING, Place, places

# Steps between what goes wrong and the next such thing.
EVERY_VARIABLE = "RAYMM_SOAK_EVERY"
EVERY = int(os.environ.get(EVERY_VARIABLE, "3"))
# Parts of a soak, each a run of its own, and how many of a hundred things go wrong in it: with new
# processes in place of the lost ones, with a spare, with a driver that is started anew, and on
# several nodes.
PARTS = {"in place": 66, "with a spare": 15, "the same command": 10, "several nodes": 9}

# What a run says of a checkpoint that was not written, or of an older one that had to stay.
UNSAVED = ("could not be saved", "an old checkpoint could not be removed")
# What a second process says of a driver that could not.
LAST_WORDS = "ended without reporting a cause"


@dataclass
class Trial:
    """One thing that goes wrong.

    Attributes:
        number: of the trial.
        part: of the soak.
        role: who: ``"rank 0"``, ``"spare"``, ``"data worker"``, ``"driver"``, ``"raylet"``,
            ``"node"``, ``"GCS"``, ``"agent"``.
        phase: while it does what.
        kind: what goes wrong.
        hits: how often it did.
        at, decided, recovered, new_step: when it did, when the driver knew, when all had gone back,
            and when a step was taken that had not been taken before; seconds.
        redone: steps that were taken again.
        text: what the driver said of it.
        last_step: that was taken when it was over.
        identical: whether all losses until the next trial are those of an undisturbed run.
        spare: the process that waited when it began, with a spare.
        spare_came: whether that has become a rank.
        ended_otherwise: exit code and sentence of a driver that did not end as documented.
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
        """Of a rank, which."""
        return int(self.role[-1]) if self.role.startswith("rank") else None

    @property
    def unsaved(self) -> bool:
        """Whether a checkpoint cannot be written by it; it is over once another one is."""
        if self.kind == "MemoryError":
            return self.phase in WRITING
        return self.kind in ("full disk", SMALL_DISK)

    @property
    def survives(self) -> bool:
        """Whether the run is to go on as if nothing were."""
        return (
            self.kind in (STOPPED, "slow disk", "NaN input", *LIMITS) or self.role == "spare"
            or self.unsaved or self.kind == "MemoryError" and self.phase in SNAPSHOT
        )

    @property
    def takes_spare(self) -> bool:
        """Whether a spare is to come in for a rank. One waits: within a recovery two are lost, and
        what was taken for the first may go with the second."""
        return self.part == "with a spare" and not self.survives and self.phase != "recovery"

    @property
    def ends_process(self) -> bool:
        """Whether the run's own process ends by it, and the same command goes on."""
        return self.part == "the same command" and not self.survives

    @property
    def documented_end(self) -> tuple[int, str]:
        """Exit code of a driver that ends by it, and a pattern of the sentence on its end."""
        return {
            "GCS": (1, r"server \(GCS\) at .* has not answered for"),
            "driver": (-signal.SIGKILL, LAST_WORDS),
        }.get(self.role, (1, rf"{LAST_WORDS}|does not listen|the Ray cluster has lost it"))

    @property
    def ends(self) -> int:
        """How often the run's own process ends by it: at its start, a second time."""
        return self.ends_process + (self.ends_process and self.phase == "start")

    @property
    def named(self) -> bool:
        """Whether the driver named the culprit. It cannot of itself, nor of its own node's raylet
        and GCS, with which Ray ends it."""
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
    """Trials of all parts, in each in a random order, in which those come first whose role, phase
    and kind were there least; none twice before all were there.

    Args:
        kills: how many.
        seed: of the order.
        parts: of which all are to be, in equal numbers; None: of each its share.
        kind: of which all are to be; None: of any.
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
    """By part, role, phase and kind, and all."""
    grouped: dict[str, Row] = {}
    for key in ("part", "role", "phase", "kind"):
        for trial in trials:
            name = getattr(trial, key)
            grouped.setdefault(f"{key} {name}", Row(name)).trials.append(trial)
    return [*grouped.values(), Row("all", list(trials))]
