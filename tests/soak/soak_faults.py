"""Faults in a rank, at a moment that a file names: imported by ranks with the run's mask.

The rank checks the file at every such moment, and removes it when its own fault is due, so that the
replacing process does not have the same fault.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from raymm.actors.executor.executor import Executor
from raymm.actors.faults.task_tracker import TaskTracker
from raymm.actors.modules import token_layout
from raymm.actors.optimizer import checkpoint_shards, host_staging
from raymm.actors.optimizer.checkpoint_shards import HostCopy
from raymm.actors.rank.connections import Connections
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.spans import Span
from raymm.scheduler.program.program import BACKWARDS, FORWARDS, Op
from tests.soak.soak_files import (
    DRIVER,
    FAULT,
    FOLDER,
    RANKS_SO_FAR,
    RAYLETS,
    SLOW_DISK_S,
    write_json,
)
from tests.support import run_processors

# Inputs of every so many-th step are not finite, in the undisturbed run, too.
NOT_FINITE_EVERY = 10
# Names of instructions in a plan of faults.
PHASES = {
    **dict.fromkeys(map(Op, FORWARDS), "forward"), **dict.fromkeys(map(Op, BACKWARDS), "backward"),
    Op.SEND: "message", Op.RECV: "message", Op.REDUCE_GRADS: "reduction",
    Op.CLIP_GRADS: "reduction", Op.STEP: "optimizer",
}
# Names of tasks that are not instructions.
TASKS = {"meeting the other ranks again": "recovery", "building stages": "start"}
# Byte limit of a file on the full disk; Python ignores the signal for it.
FULL = 100


def causal(
    length: int, spans: Sequence[Span], document_lengths: Sequence[int]
) -> AttentionMask:
    """Return raymm's own mask."""
    return token_layout.causal(length, spans, document_lengths)


def image(path: str) -> dict[str, torch.Tensor]:
    """Return a picture in a data worker; pictures that the driver loads cause no fault."""
    if MOMENT.role is None and os.environ.get(DRIVER) != str(os.getpid()):
        MOMENT.role = "data worker"
    MOMENT.reached("loading")
    return run_processors.image(path)


class _Moment:
    """Moment of a fault in this process."""

    def __init__(self) -> None:
        self.folder = Path(os.environ.get(FOLDER, "/nowhere"))
        self.role: str | None = None
        self.evaluating = False

    def reached(self, phase: str) -> None:
        """Cause the fault in the file, if it is due in this phase."""
        file = self.folder / FAULT
        if self.role is None or not file.exists():
            return
        try:
            fault = json.loads(file.read_text())
            if (fault["role"], fault["phase"]) != (self.role, phase):
                return
            taken = self.folder / f"taken-{fault['number']}.json"
            file.rename(taken)  # in one process only
        except (OSError, ValueError):
            return
        write_json(taken, {**fault, "at": time.time(), "pid": os.getpid()})
        _go_wrong(fault["kind"], self.folder)


def _go_wrong(kind: str, folder: Path) -> None:
    if kind == "MemoryError":
        raise MemoryError("no memory, says the soak")
    if kind == "slow disk":
        time.sleep(SLOW_DISK_S)
    elif kind == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, resource.RLIM_INFINITY))
    elif kind == "hang":
        time.sleep(3600)
    elif kind == "node":
        raylets = json.loads((folder / RAYLETS).read_text())
        os.kill(raylets[ray.get_runtime_context().get_node_id()], signal.SIGKILL)
    else:
        os.kill(os.getpid(), getattr(signal, kind.partition(",")[0]))


MOMENT = _Moment()


def _observed_enter(enter: Any) -> Any:
    def entered(self: TaskTracker, instruction: Any) -> None:
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


def _observed_write(write: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the writing of a checkpoint; afterwards, a full disk has space again."""
    @functools.wraps(write)
    def called(*args: Any) -> Any:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            MOMENT.reached("checkpoint: create")
            written = write(*args)
            MOMENT.reached("checkpoint: written")
            return written
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return called


def _observed_connections(made: Any) -> Any:
    def connected(self: Connections, spec: Any, *args: Any) -> None:
        MOMENT.role = f"rank {spec.rank}"
        (MOMENT.folder / f"rank-{spec.rank}.pid").write_text(str(os.getpid()))
        with open(MOMENT.folder / RANKS_SO_FAR, "a") as file:
            file.write(f"{os.getpid()}\n")
        made(self, spec, *args)

    return connected


def _observed_run(run: Any) -> Any:
    def started(self: Executor, prepared: Any, inputs: Any, meta: Any) -> Any:
        MOMENT.evaluating = not meta.training
        if meta.training and meta.step % NOT_FINITE_EVERY == NOT_FINITE_EVERY - 1:
            inputs = {stage: list(map(_not_finite, parts)) for stage, parts in inputs.items()}
        return run(self, prepared, inputs, meta)

    return started


def _not_finite(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the part with NaN pixels."""
    return None if part is None else {
        name: value * float("nan")
        if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in part.items()
    }


def install() -> None:
    """Observe this process if it is a rank of a soak.

    Ray copies an actor's methods when it reads its class, so patching those has no effect.
    """
    observed: Any = TaskTracker
    if FOLDER not in os.environ or hasattr(observed, "soaked"):
        return
    observed.soaked = True
    for owner, name, watch in (
        (TaskTracker, "enter", _observed_enter), (Connections, "__init__", _observed_connections),
        (Executor, "run", _observed_run), (HostCopy, "write", _observed_write),
    ):
        setattr(owner, name, watch(getattr(owner, name)))
    for owner, name, phase in (
        (host_staging, "copy_of", "snapshot"), (host_staging, "packed", "snapshot: hand over"),
        (host_staging, "restore", "recovery"), (HostCopy, "copy", "checkpoint: copy"),
        (checkpoint_shards, "save_file", "checkpoint: write"),
        (checkpoint_shards, "_checksum_of_source", "checkpoint: sync"),
    ):
        setattr(owner, name, _observed(getattr(owner, name), phase))


install()
