"""Error messages of rank failures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ray.exceptions import OutOfMemoryError, RayActorError

from raymm.actors.faults.flight_recorder import records_text
from raymm.actors.faults.inquiry import Inquiry
from raymm.actors.faults.stacks import Look

# Number of ranks whose activity an error message lists; files list all ranks.
SHOWN_RANKS = 16


def accusation(
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
    lines += other_lines[:SHOWN_RANKS]
    if len(other_lines) > SHOWN_RANKS:
        lines.append(f"and {len(other_lines) - SHOWN_RANKS} more")
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
        reason = raised_at(str(error))
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


def raised_at(traceback: str) -> str:
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


_PLACE = re.compile(r'\s*File "(.+)", line (\d+), in (\S+)')
