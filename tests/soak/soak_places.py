"""Possible faults: roles by phases by kinds, and reasons why some are impossible."""

from __future__ import annotations

import itertools
from typing import NamedTuple

RANKS = 2
STOPPED = "SIGSTOP, SIGCONT"
SIGNALS = ("SIGKILL", "SIGSTOP", STOPPED)
# Temporary limits of a process (prlimit); a disk that is really full, temporarily; and other users'
# files in the run's folder when the same command starts.
LIMITS = ("no files", "no threads")
SMALL_DISK = "small disk"
FILES = ("linked checkpoint", "FIFO manifest")
KINDS = (
    *SIGNALS, "hang", "MemoryError", "full disk", "slow disk", "NaN input", *LIMITS, SMALL_DISK,
    *FILES,
)
# Phases of writing a rank's part of a checkpoint.
WRITING = ("checkpoint: create", "checkpoint: write", "checkpoint: sync", "checkpoint: written")
STEP = ("forward", "backward", "message", "reduction", "optimizer")
SNAPSHOT = ("snapshot", "snapshot: hand over")
OF_RANKS = (
    *STEP, *SNAPSHOT, "checkpoint: copy", *WRITING, "evaluation", "start", "recovery",
)
# Phases in which ranks run the user's code.
USERS = ("forward", "backward", "evaluation")
# File operations while the driver commits a checkpoint.
COMMIT = tuple(f"checkpoint: file {number}" for number in range(10))
# Phases of each role.
PHASES_OF = {
    **{f"rank {number}": (*OF_RANKS, "between steps") for number in range(RANKS)},
    "spare": ("waiting",), "data worker": ("loading",),
    "driver": ("between steps", "evaluation", "start", "recovery", *COMMIT),
    "node": ("between steps", *OF_RANKS),
    "raylet": ("between steps",), "GCS": ("between steps",), "agent": ("between steps",),
}
PHASES = tuple(dict.fromkeys(itertools.chain(*PHASES_OF.values())))


class Place(NamedTuple):
    """Role, phase and kind of a fault."""

    role: str
    phase: str
    kind: str


def why_not(place: Place) -> str:
    """Return why this fault is impossible; empty if it is possible."""
    role, phase, kind = place
    if phase not in PHASES_OF[role]:
        return "the role is never in that phase"
    if kind == "NaN input":
        return "" if role == "data worker" else "inputs come from data workers"
    rule = {
        "spare": _of_spare, "data worker": _of_worker, "driver": _of_driver, "node": _of_node,
        "raylet": _of_server, "GCS": _of_server, "agent": _of_server,
    }.get(role, _of_rank)
    return rule(phase, kind)


def _of_rank(phase: str, kind: str) -> str:
    if kind in (SMALL_DISK, *FILES):
        return "the driver is drawn for the run's folder"
    if kind in LIMITS or phase == "between steps":
        same = kind in LIMITS and phase == "between steps"
        return "" if same else "a limit lasts for more than a phase, and begins between steps"
    if kind == "hang" and phase not in USERS:
        return "no code of the user's runs there; SIGSTOP is what else hangs"
    if kind == "full disk" and phase == WRITING[-1]:
        return "all is written by then"
    if kind in ("full disk", "slow disk") and phase not in WRITING:
        return "no file is written there"
    return ""


def _of_spare(phase: str, kind: str) -> str:
    return "" if kind in SIGNALS else "it runs no code of the user's and writes no file"


def _of_worker(phase: str, kind: str) -> str:
    if kind in FILES:
        return "the driver is drawn for the run's folder"
    return "it writes no file" if "disk" in kind else ""


def _of_driver(phase: str, kind: str) -> str:
    if kind in LIMITS:
        return "limits are of ranks and data workers"
    if kind in (SMALL_DISK, *FILES):
        return "" if phase == "between steps" else "files are changed between steps"
    if kind in ("SIGSTOP", "hang"):
        return "nobody looks after the driver but who started it"
    if kind == "MemoryError":
        return "a callback that raises is left out, and the run continues without it"
    if "disk" in kind and phase not in COMMIT:
        return "only a checkpoint's files may fail; the run ends by its logs'"
    if kind == STOPPED and phase in ("start", "recovery"):
        return "nothing is done there but waiting for ranks, which are drawn themselves"
    return ""


def _of_node(phase: str, kind: str) -> str:
    return "" if kind == "SIGKILL" else "a node is there, or is not; its processes are drawn"


def _of_server(phase: str, kind: str) -> str:
    if kind in ("SIGKILL", STOPPED):
        return ""
    if kind in LIMITS:
        return "limits are of ranks and data workers"
    if kind == "SIGSTOP":
        return "it would outlive the soak: it is of whoever runs the cluster"
    return "it runs nothing of raymm's"


def combinations() -> list[Place]:
    """Return all combinations."""
    return [Place(*each) for each in itertools.product(PHASES_OF, PHASES, KINDS)]


def places() -> dict[str, list[Place]]:
    """Return the possible faults, by part of the soak."""
    can = [place for place in combinations() if not why_not(place)]
    ranks = [place for place in can if place.role.startswith("rank")]
    ends = [
        place for place in can
        if place.role in ("raylet", "GCS", "agent")
        or place.role == "driver" and place.kind in ("SIGKILL", *FILES)
    ]
    in_place = [
        *ranks, *[place for place in can if place.role == "data worker"],
        *[place for place in can if place.role == "driver" and place not in ends],
    ]
    taken = ("SIGKILL", "SIGSTOP", "hang")
    spare = [
        *[place for place in ranks if place.kind in taken and place.phase not in WRITING],
        *[place for place in can if place.role == "spare"],
    ]
    return {
        "in place": in_place, "with a spare": spare, "the same command": ends,
        "several nodes": [place for place in can if place.role == "node"],
    }


def left_out() -> dict[str, list[str]]:
    """Return the reasons for impossible faults, with the faults."""
    reasons: dict[str, list[str]] = {}
    for place in combinations():
        reason = why_not(place)
        if reason and place.phase in PHASES_OF[place.role]:
            text = f"{place.role}, {place.kind}"
            told = reasons.setdefault(reason, [])
            if text not in told:
                told.append(text)
    return reasons
