"""Diagnosis of rank failures from how the ranks' calls ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from ray.exceptions import RayActorError, RayTaskError

from raymm.actors.faults.failure import SHOWN_RANKS, accusation, first_line
from raymm.actors.faults.failure_kind import constructor_kind, failure_kind
from raymm.actors.faults.flight_recorder import records_text
from raymm.actors.faults.inquiry import Inquiry, look_from_outside
from raymm.actors.faults.stacks import Address
from raymm.errors import FailureKind, RankFailedError, RunFailedError


@dataclass(frozen=True)
class Failure:
    """Failure of ranks.

    Attributes:
        kind: makes the error, unless a rank's code raised one.
        lost: ranks whose processes are gone or unusable; None if replacing processes would not
            help.
        raised: kind of the error that a rank's code raised; None if none raised an error.
    """

    message: str
    kind: Callable[[str], RunFailedError] = RankFailedError
    lost: frozenset[int] | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    raised: FailureKind | None = None

    @property
    def own(self) -> bool:
        """True if a rank's code raised and all processes are alive."""
        return self.raised is not None and self.lost == frozenset()

    def error(self, message: str) -> RunFailedError:
        return self.kind(message) if self.raised is None else RankFailedError(message, self.raised)


def death(
    rank: int, error: RayActorError, names: Sequence[str], addresses: Mapping[int, Address]
) -> Failure:
    """Return the failure of a run whose rank has died, with stacks of the other ranks."""
    looks = look_from_outside(dict(list(addresses.items())[:SHOWN_RANKS]))
    message = f"{names[rank]} died: {first_line(error)}{records_text(names, looks)}"
    stacks = {f"rank-{n}.txt": look.stacks for n, look in looks.items() if look.stacks}
    texts = {**stacks, f"rank-{rank}.txt": str(error)}
    if error.actor_init_failed:
        kind = constructor_kind(str(error))
        # A replacement would raise the same error, unless the cause is temporary.
        lost = frozenset({rank}) if kind.passes else None
        return Failure(message, lost=lost, texts=texts, raised=kind)
    return Failure(message, RankFailedError, frozenset({rank}), texts)


def raised(rank: int, error: RayTaskError, names: Sequence[str]) -> Failure:
    """Diagnose an error that a rank's own code raised, as opposed to a lost connection."""
    cause = cause_of(error)
    kind = failure_kind(cause)
    reason = f"{type(cause).__name__}: {cause}"
    if not isinstance(cause, ValueError):
        if kind is FailureKind.DEFECT:
            reason += "\nraymm's own code raised this error; please report it with its traceback"
        reason += f"\n{error}"  # unexpected: show where it was raised
    message, texts = f"{names[rank]} failed: {reason}", {f"rank-{rank}.txt": str(error)}
    if isinstance(cause, torch.AcceleratorError):  # a failed device; another device may work
        return Failure(message, RankFailedError, frozenset({rank}), texts)
    return Failure(message, lost=frozenset(), texts=texts, raised=kind)


def cause_of(error: RayTaskError) -> BaseException:
    return error if error.cause is None else error.cause


def blamed(
    inquiry: Inquiry, reason: str, names: Sequence[str], addresses: Mapping[int, Address],
    culprits: Sequence[int],
) -> Failure:
    """Diagnose the rank that the others wait for, and report what each rank was doing. Kills
    ``culprits``, the rank at fault and further ranks to end: the other ranks leave their operations
    only after the connections to a hung rank are closed. Empty ``culprits`` mean that the cause is
    unknown."""
    looks = look_from_outside(addresses, end=[rank for rank in culprits if rank in addresses])
    message, texts = accusation(names, inquiry, looks, reason, next(iter(culprits), None))
    return Failure(message, RankFailedError, frozenset({*inquiry.dead, *culprits}), texts)
