"""Script that kills saving processes: before every file operation, and at random moments.

Not a test by itself: it forks, so it is a separate process without Ray and threads. Uses SIGKILL
and prints one JSON line.

    python tests/support/killed_saves.py FOLDER RANDOM_KILLS
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from raymm.actors.optimizer.checkpoint_shards import HostCopy, Saved
from raymm.actors.optimizer.host_staging import HostStaging
from raymm.actors.optimizer.stored_tensors import StoredTensors
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.search.module_degrees import make_plan
from raymm.storage import checkpoint
from raymm.storage.checkpoint import CheckpointStore

RANKS = 2
# Python's audit events of file operations.
OPERATIONS = {
    "open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir",
    "shutil.rmtree",
}


class Running:
    """Running model on two ranks, and their group, with one tensor each that holds the step.

    Args:
        step: finished steps.
        size: elements of each tensor.
    """

    def __init__(self, step: int, size: int = 1000) -> None:
        graph = ModuleGraph((ModuleNode("llm", (True,)),), ())
        profile = CostProfile({"llm": (LayerCost(1.0, 1.0, 1.0),)})
        self.plan = make_plan(graph, {"llm": ((0, 1),)}, 1, profile=profile)
        self.steps_taken, self.group, self.patience = step, self, 60.0
        self.kernels: dict[str, str] = {}
        self.tensors = [torch.full((size,), float(step)) for _ in range(RANKS)]
        self.copies = [HostCopy(HostStaging(torch.device("cpu"))) for _ in range(RANKS)]

    def check_answers(self) -> None:
        """Succeed, as all ranks are alive."""

    def reloadable(self) -> frozenset[str]:
        return frozenset()

    def call(self, method: str, skip_frozen: frozenset[str]) -> list[int]:
        assert method == "copy_state"
        return [
            copy.copy(Saved({f"model-rank{rank}.safetensors": {f"llm/x{rank}": tensor}}))
            for rank, (copy, tensor) in enumerate(zip(self.copies, self.tensors, strict=True))
        ]


def write_copies(group: Running, method: str, folder: str) -> list:
    """Write the copies here instead of in Ray's actors."""
    assert method == "write_copy"
    return [copy.write(folder) for copy in group.copies]


def save(root: Path, step: int) -> None:
    """Save a step in the background; the tensors change meanwhile."""
    store = CheckpointStore(root, keep=1)
    store.newest()
    store.remove_leftovers()
    running = Running(step)
    store.start(running, {"data": step})
    for tensor in running.tensors:
        tensor.fill_(-1.0)
    store.finish()


def forked(work: Callable[[], None]) -> int:
    """Run the work in a fork; return its exit status, or minus the signal that ended it."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_before(root: Path, number: int) -> None:
    """Save step 2, and die before the file operation of that number."""
    seen, counting = 0, threading.Lock()

    def hook(event: str, args: tuple) -> None:
        nonlocal seen
        if event in OPERATIONS and args and str(root) in str(args[0]):
            with counting:
                seen += 1
                if seen > number:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save(root, 2)


def killed_after(root: Path, seconds: float) -> None:
    """Save step 2, and die after so many seconds."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
    save(root, 2)


def newest_step(root: Path) -> int:
    """Return the newest intact checkpoint's step, which must be its every value."""
    found = CheckpointStore(root).newest()
    assert found is not None and not found.corrupt, found
    manifest = found.manifest
    stored = StoredTensors(found.folder, manifest.index, manifest.shards)
    read = stored.read({f"llm/x{rank}": None for rank in range(RANKS)})
    assert len(read) == RANKS
    for tensor in read.values():
        assert tensor.eq(manifest.step).all(), manifest.step
    assert manifest.trainer == {"data": manifest.step}
    return manifest.step


def outcome(root: Path, work: Callable[[], None]) -> tuple[int, int]:
    """Return the exit status of a save of step 2 after step 1, and the newest intact step.

    A run can resume from either step.
    """
    shutil.rmtree(root, ignore_errors=True)
    save(root, 1)
    status = forked(work)
    step = newest_step(root)
    save(root, 3)
    assert newest_step(root) == 3 and len(CheckpointStore(root).committed()) == 1
    return status, step


def main() -> None:
    root, kills = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    checkpoint.call_ranks_behind = write_copies
    at_operations: list[int] = []
    status = -signal.SIGKILL
    while status == -signal.SIGKILL:
        number = len(at_operations)
        status, step = outcome(root, partial(killed_before, root, number))
        at_operations.append(step)
    assert status == 0, status
    start = time.perf_counter()
    forked(lambda: save(root, 4))
    longest = 1.5 * (time.perf_counter() - start)
    draw = random.Random(0)
    at_moments = [
        outcome(root, lambda: killed_after(root, draw.uniform(0, longest)))
        for _ in range(kills)
    ]
    print(json.dumps({"at_operations": at_operations, "at_moments": at_moments}))


if __name__ == "__main__":
    main()
