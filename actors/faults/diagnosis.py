"""Diagnosis of rank failures from how the ranks' calls ended, and their error messages."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from raymm.actors.faults.failure_kind import constructor_kind, failure_kind
from raymm.actors.faults.inquiry import Inquiry, look_from_outside
from raymm.actors.faults.stacks import Address, Look, records_text
from raymm.errors import FailureKind, RankFailedError, RunFailedError

_run_folder: ContextVar[Path | None] = ContextVar("run_folder", default=None)


@contextmanager
def faults_kept_in(run_folder: Path) -> Iterator[None]:
    """Save faults that occur in the block in ``run_folder/faults``, instead of Ray's log folder."""
    token = _run_folder.set(run_folder)
    try:
        yield
    finally:
        _run_folder.reset(token)


def keep(texts: Mapping[str, str]) -> str:
    """Write files, given as name -> text, into a new folder. Return the folder, or the reason why
    it cannot be written, because the caller reports a more important error."""
    folder = _base() / "faults" / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, errors="backslashreplace")
    except OSError as error:
        return f"not saved: {error}"
    return str(folder)


def _base() -> Path:
    if (folder := _run_folder.get()) is not None:
        return folder
    import ray._private.worker

    node = ray._private.worker._global_node
    return Path(tempfile.gettempdir() if node is None else node.get_logs_dir_path())


# Number of ranks whose activity an error message lists; files list all ranks.
_SHOWN_RANKS = 16
_PLACE = re.compile(r'\s*File "(.+)", line (\d+), in (\S+)')


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
    looks = look_from_outside(dict(list(addresses.items())[:_SHOWN_RANKS]))
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
    message, texts = _accusation(names, inquiry, looks, reason, next(iter(culprits), None))
    return Failure(message, RankFailedError, frozenset({*inquiry.dead, *culprits}), texts)


def _accusation(
    names: Sequence[str],
    inquiry: Inquiry,
    looks: Mapping[int, Look],
    reason: str,
    culprit: int | None,
) -> tuple[str, dict[str, str]]:
    """Describe the rank at fault (None if unknown), and what every rank was doing.

    Returns:
        The message, with the rank at fault in its first line if known; and the text of a file per
        rank.
    """
    doing = [f"{name} {_doing(rank, inquiry, looks)}" for rank, name in enumerate(names)]
    lines = [reason] if culprit is None else [doing[culprit], reason]
    other_lines = [text for number, text in enumerate(doing) if number != culprit]
    lines += other_lines[:_SHOWN_RANKS]
    if len(other_lines) > _SHOWN_RANKS:
        lines.append(f"and {len(other_lines) - _SHOWN_RANKS} more")
    texts = {f"rank-{n}.txt": f"{doing[n]}\n{look.stacks}" for n, look in looks.items()}
    return "\n".join(lines) + records_text(names, looks), texts


def _doing(rank: int, inquiry: Inquiry, looks: Mapping[int, Look]) -> str:
    if rank in inquiry.dead:
        return f"died: {first_line(inquiry.dead[rank])}"
    if rank in inquiry.reports:
        return str(inquiry.reports[rank])
    return f"does not answer; it is {looks[rank].state if rank in looks else 'out of reach'}"


def first_line(error: BaseException) -> str:
    """Return the essential line of a Ray error, without its context."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, OutOfMemoryError):  # Ray's memory monitor chose this process
        return " ".join(lines[:2]).partition(" Ray killed")[0]
    if isinstance(error, RayActorError) and "creation task" in str(error):
        reason = _raised_at(str(error))
        if reason.startswith(ModuleNotFoundError.__name__):
            reason += (
                ". Ranks can import installed packages, and modules in the working directory, the "
                "script's folder or PYTHONPATH; they do not see what a program adds to sys.path"
            )
        return f"it could not start: {reason}"
    for line in lines:
        if "died because" in line or "cause" in line.lower() or "Worker" in line:
            return line.partition(" Some common causes")[0]
    return lines[0] if lines else type(error).__name__


def _raised_at(traceback: str) -> str:
    """Return error and location from a traceback: ``"KeyError: 'a', raised in build (model.py, line
    3)"``."""
    lines = [line for line in traceback.splitlines() if line.strip()]
    frames = [n for n, line in enumerate(lines) if _PLACE.match(line)]
    if not frames:
        return lines[-1].strip() if lines else "the reason is unknown"
    # The last location is followed by its source line, markers below it, and the error.
    error = [line for line in lines[frames[-1] + 1 :] if not line.startswith(" ")]
    frame = _PLACE.match(lines[frames[-1]])
    assert frame is not None
    file, number, function = frame.groups()
    text = " ".join(line.strip() for line in error) or lines[-1].strip()
    return f"{text}, raised in {function} ({file}, line {number})"
