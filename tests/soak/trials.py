"""What is to go wrong in a soak, and the table of what has become of it."""

from __future__ import annotations

import itertools
import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

RANKS = 2
# Steps between what goes wrong and the next such thing.
EVERY_VARIABLE = "RAYMM_SOAK_EVERY"
EVERY = int(os.environ.get(EVERY_VARIABLE, "3"))
STOPPED = "SIGSTOP, SIGCONT"
# Parts of a soak, each a run of its own, and how many of a hundred things go wrong in it: with new
# processes in place of the lost ones, with a spare, with a driver that is started anew, and on
# several nodes.
PARTS = {"in place": 70, "with a spare": 15, "the same command": 10, "several nodes": 5}
WRITING = ("checkpoint: create", "checkpoint: write", "checkpoint: sync", "checkpoint: written")
PHASES = (
    "forward", "backward", "message", "reduction", "optimizer", "snapshot", "snapshot: hand over",
    "checkpoint: copy", *WRITING, "evaluation", "recovery",
)
# Where an error is raised, and not where it is only noticed by who waits for the result.
RAISES = ("forward", "backward", "message", "reduction", "optimizer", "evaluation")
# Where code of the user's runs.
USERS = ("forward", "backward", "evaluation")
# Operations on files while the driver commits a checkpoint.
OPERATIONS = 10


@dataclass
class Trial:
    """One thing that goes wrong.

    Attributes:
        number: of the trial.
        part: of the soak.
        role: who: ``"rank 0"``, ``"spare"``, ``"data worker"``, ``"driver"``, ``"raylet"``,
            ``"node"``, ``"GCS"``.
        phase: while it does what.
        kind: what goes wrong.
        at, decided, recovered, new_step: when it did, when the driver knew, when all had gone back,
            and when a step was taken that had not been taken before; seconds.
        redone: steps that were taken again.
        text: what the driver said of it.
        last_step: that was taken when it was over.
        identical: whether all losses until the next trial are those of an undisturbed run.
    """

    number: int
    part: str
    role: str
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
    def rank(self) -> int | None:
        """Of a rank, which."""
        return int(self.role[-1]) if self.role.startswith("rank") else None

    @property
    def survives(self) -> bool:
        """Whether the run is to go on as if nothing were."""
        return self.kind in (STOPPED, "slow disk", "full disk") or self.role == "spare"

    @property
    def ends_process(self) -> bool:
        """Whether the run's own process ends by it, and the same command goes on."""
        return self.part == "the same command" and not self.survives

    @property
    def named(self) -> bool:
        """Whether the driver named the culprit. Of itself it cannot."""
        who = {
            "data worker": "data worker", "node": "node ", "raylet": "(raylet)",
            "GCS": "server (GCS)", **{f"rank {n}": f"rank {n} " for n in range(RANKS)},
        }.get(self.role, "")
        return self.survives or who in self.text


Place = tuple[str, str, str]


def places() -> dict[str, list[Place]]:
    """Role, phase and kind of all that can go wrong, by part."""
    ranks = [f"rank {number}" for number in range(RANKS)]
    in_place = [
        *itertools.product(ranks, PHASES, ("SIGKILL", "SIGSTOP", STOPPED)),
        *itertools.product(ranks, RAISES, ("MemoryError",)),
        *itertools.product(ranks, USERS, ("hang",)),
        *itertools.product(ranks, ("checkpoint: write",), ("full disk", "slow disk")),
        *itertools.product(ranks, ("start",), ("SIGSTOP", STOPPED)),
        *[("data worker", "loading", "SIGKILL")] * 4,
    ]
    spare = [
        *itertools.product(ranks, ("forward", "backward", "optimizer", "message"), ("SIGKILL",)),
        *itertools.product(ranks, ("forward",), ("SIGSTOP", "hang")),
        *itertools.product(["spare"], ["waiting"], ("SIGKILL", "SIGSTOP")),
    ]
    command = [
        ("driver", "between steps", "SIGKILL"), ("driver", "evaluation", "SIGKILL"),
        *[("driver", f"checkpoint: file {n}", "SIGKILL") for n in range(OPERATIONS)],
        ("raylet", "between steps", "SIGKILL"), ("GCS", "between steps", "SIGKILL"),
        ("GCS", "between steps", STOPPED), ("raylet", "between steps", STOPPED),
    ]
    nodes = [("node", "between steps", "SIGKILL")]
    return dict(zip(PARTS, (in_place, spare, command, nodes), strict=True))


def draw(
    kills: int, seed: int, part: str | None = None, kind: str | None = None
) -> list[Trial]:
    """Trials of all parts, in each of all its places in a random order, none twice before all were
    there.

    Args:
        kills: how many.
        seed: of the order.
        part: of which all are to be; None: of each its share.
        kind: of which all are to be; None: of any.
    """
    generator, trials = random.Random(seed), []
    counts = dict.fromkeys(PARTS, 0)
    if part is None:
        counts = {name: kills * share // 100 for name, share in PARTS.items()}
    counts[part or "in place"] += kills - sum(counts.values())
    for name, there in places().items():
        there = [place for place in there if kind in (None, place[2])]
        drawn: list[Place] = []
        while len(drawn) < counts[name]:
            generator.shuffle(there)
            drawn += there
        trials += [(name, *place) for place in drawn[: counts[name]]]
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
