"""What goes wrong in a rank, at a moment that a file names: imported by ranks with the run's mask.

The rank looks for the file when a step begins, and takes it away when its moment has come, so that
the process that comes in its place does not meet with the same.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raymm.actors.executor.executor import Executor
from raymm.actors.faults.whereabouts import Whereabouts
from raymm.actors.modules import token_layout
from raymm.actors.optimizer import snapshot
from raymm.actors.optimizer.checkpoint_writer import HostCopy
from raymm.actors.rank.connections import Connections
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.spans import Span
from raymm.scheduler.program.program import BACKWARDS, FORWARDS, Op

FOLDER = "RAYMM_SOAK_FOLDER"
# What instructions are called in a plan of faults.
PHASES = {
    **dict.fromkeys(map(Op, FORWARDS), "forward"), **dict.fromkeys(map(Op, BACKWARDS), "backward"),
    Op.SEND: "message", Op.RECV: "message", Op.REDUCE_GRADS: "reduction",
    Op.CLIP_GRADS: "reduction", Op.STEP: "optimizer",
}
# Of tasks that are no instructions.
TASKS = {"meeting the other ranks again": "recovery"}


def causal(
    length: int, spans: Sequence[Span], document_lengths: Sequence[int]
) -> AttentionMask:
    """raymm's own."""
    return token_layout.causal(length, spans, document_lengths)


class _Moment:
    """When something is to go wrong in this process."""

    def __init__(self) -> None:
        self.folder = Path(os.environ.get(FOLDER, "/nowhere"))
        self.rank: int | None = None
        self.evaluating = False

    def reached(self, phase: str) -> None:
        """This process is there: does what the file says, if it says so."""
        file = self.folder / "fault.json"
        if self.rank is None or not file.exists():
            return
        try:
            fault = json.loads(file.read_text())
            if (fault["rank"], fault["phase"]) != (self.rank, phase):
                return
            taken = self.folder / f"taken-{fault['number']}.json"
            file.rename(taken)  # by one process only
        except (OSError, ValueError):
            return
        taken.write_text(json.dumps({**fault, "at": time.time(), "pid": os.getpid()}))
        _go_wrong(fault["kind"])


def _go_wrong(kind: str) -> None:
    if kind == "MemoryError":
        raise MemoryError("no memory, says the soak")
    if kind == "hang":
        time.sleep(3600)
    os.kill(os.getpid(), getattr(signal, kind.partition(",")[0]))


MOMENT = _Moment()


def _observed_enter(enter: Any) -> Any:
    def entered(self: Whereabouts, instruction: Any) -> None:
        enter(self, instruction)
        if isinstance(instruction, str):
            phase = TASKS.get(instruction)
        else:
            phase = "evaluation" if MOMENT.evaluating else PHASES.get(instruction.op)
        if phase is not None:
            MOMENT.reached(phase)

    return entered


def _observed(function: Any, phase: str) -> Any:
    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        MOMENT.reached(phase)
        return function(*args, **options)

    return called


def _observed_connections(made: Any) -> Any:
    def connected(self: Connections, spec: Any, *args: Any) -> None:
        MOMENT.rank = spec.rank
        (MOMENT.folder / f"rank-{spec.rank}.pid").write_text(str(os.getpid()))
        made(self, spec, *args)

    return connected


def _observed_run(run: Any) -> Any:
    def started(self: Executor, prepared: Any, inputs: Any, meta: Any) -> Any:
        MOMENT.evaluating = not meta.training
        return run(self, prepared, inputs, meta)

    return started


def install() -> None:
    """Watch what this process does, if it is a rank of a soak. Ray copies an actor's methods when
    it reads its class, so those are of no use here."""
    observed: Any = Whereabouts
    if FOLDER not in os.environ or hasattr(observed, "soaked"):
        return
    observed.soaked = True
    for owner, name, watch in (
        (Whereabouts, "enter", _observed_enter), (Connections, "__init__", _observed_connections),
        (Executor, "run", _observed_run),
    ):
        setattr(owner, name, watch(getattr(owner, name)))
    for owner, name, phase in (
        (snapshot, "copy_of", "snapshot"), (snapshot, "packed", "snapshot"),
        (snapshot, "restore", "recovery"), (HostCopy, "copy", "checkpoint"),
        (HostCopy, "write", "checkpoint"),
    ):
        setattr(owner, name, _observed(getattr(owner, name), phase))


install()
