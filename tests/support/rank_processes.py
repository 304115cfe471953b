"""Processes in gloo groups, started once, that run functions of test modules."""

from __future__ import annotations

import importlib
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.support.fork_server import fork_server

MOST_RANKS = 4
TIMEOUT = timedelta(seconds=120)


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT
    )
    groups = {n: dist.new_group(list(range(n)), timeout=TIMEOUT) for n in range(1, size + 1)}
    while (job := pipe.recv()) is not None:
        module, name, ranks, kwargs = job
        try:
            function = getattr(importlib.import_module(module), name)
            pipe.send((None, function(group=groups[ranks], **kwargs)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()


class RankProcesses:
    """Processes that wait for work; see :func:`rank_processes`."""

    def __init__(self, pipes: list[Any]) -> None:
        self._pipes = pipes

    def run(self, function: Any, ranks: int, **kwargs: Any) -> list[Any]:
        """Call ``function(group=..., **kwargs)`` on the first ``ranks`` processes; return the
        results.

        Raises:
            AssertionError: a rank failed; contains its traceback.
        """
        for pipe in self._pipes[:ranks]:
            pipe.send((function.__module__, function.__name__, ranks, kwargs))
        answers = []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            assert pipe.poll(TIMEOUT.total_seconds()), f"rank {rank} does not answer"
            answers.append(pipe.recv())
        failed = [f"rank {r}: {error}" for r, (error, _) in enumerate(answers) if error]
        assert not failed, "\n".join(failed)
        return [result for _, result in answers]


@contextmanager
def rank_processes(size: int = MOST_RANKS) -> Iterator[RankProcesses]:
    """Start ``size`` processes; they are stopped on exit, by force if they hang."""
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, f"{folder}/store", theirs), daemon=True
            )
            process.start()
            pipes.append(mine)
            processes.append(process)
        try:
            yield RankProcesses(pipes)
        finally:
            for pipe in pipes:
                pipe.send(None)
            for process in processes:
                process.join(10)
                process.kill()
