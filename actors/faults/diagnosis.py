"""What has happened to ranks that do not go on, told from how their calls ended."""

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
    """Why ranks do not go on.

    Attributes:
        message: names who is to blame.
        kind: class of the error, unless a rank's code raised.
        lost: ranks whose processes are gone, or of no use any more; None: processes in their places
            would not help.
        texts: tracebacks and stacks, by file name.
        raised: kind of what a rank's code raised; None if no rank's code raised.
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
        """Return the error to raise, with a text that may be longer than :attr:`message`."""
        return self.kind(message) if self.raised is None else RankFailedError(message, self.raised)


def death(
    rank: int, error: RayActorError, names: Sequence[str], addresses: Mapping[int, Address]
) -> Failure:
    """A rank's process has died.

    Args:
        rank: which.
        error: what Ray says.
        names: of all ranks.
        addresses: of ranks that have started.
    """
    looks = look_from_outside(dict(list(addresses.items())[:SHOWN_RANKS]))
    said = f"{names[rank]} died: {first_line(error)}{records_text(names, looks)}"
    stacks = {f"rank-{n}.txt": look.stacks for n, look in looks.items() if look.stacks}
    texts = {**stacks, f"rank-{rank}.txt": str(error)}
    if error.actor_init_failed:
        kind = constructor_kind(str(error))
        # Another process in its place would raise the same error, unless the cause passes.
        lost = frozenset({rank}) if kind.passes else None
        return Failure(said, lost=lost, texts=texts, raised=kind)
    return Failure(said, RankFailedError, frozenset({rank}), texts)


def raised(rank: int, error: RayTaskError, names: Sequence[str]) -> Failure:
    """A rank has raised what is its own, not that a connection was lost.

    Args:
        rank: which.
        error: what it has raised.
        names: of all ranks.
    """
    cause = cause_of(error)
    kind = failure_kind(cause)
    reason = f"{type(cause).__name__}: {cause}"
    if not isinstance(cause, ValueError):
        if kind is FailureKind.DEFECT:
            reason += "\nraymm's own code raised this error; please report it with its traceback"
        reason += f"\n{error}"  # nobody expected it: show where it came from
    message, texts = f"{names[rank]} failed: {reason}", {f"rank-{rank}.txt": str(error)}
    if isinstance(cause, torch.AcceleratorError):  # a device that fails, another one may not
        return Failure(message, RankFailedError, frozenset({rank}), texts)
    return Failure(message, lost=frozenset(), texts=texts, raised=kind)


def cause_of(error: RayTaskError) -> BaseException:
    """What was raised."""
    return error if error.cause is None else error.cause


def blamed(
    inquiry: Inquiry, reason: str, names: Sequence[str], addresses: Mapping[int, Address],
    culprits: Sequence[int],
) -> Failure:
    """The rank that the others wait for, and what each was doing. Ends culprits: nobody leaves an
    operation with one that hangs before its end of the connection is gone.

    Args:
        inquiry: what ranks said.
        reason: why they were asked.
        names: of all ranks.
        addresses: of ranks that have started.
        culprits: that rank, and others that are to go; empty: nobody knows.
    """
    looks = look_from_outside(addresses, end=[rank for rank in culprits if rank in addresses])
    message, texts = accusation(names, inquiry, looks, reason, next(iter(culprits), None))
    return Failure(message, RankFailedError, frozenset({*inquiry.dead, *culprits}), texts)
