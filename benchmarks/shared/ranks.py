"""Processes in one gloo group for benchmarks without Ray, optionally on a slow network.

Ways to slow the network, best first:

- ``namespace``: the benchmark's process moves to a new network namespace, whose loopback gets a
  token bucket filter (``tc ... tbf``) that all ranks share. Needs root and iproute2. Nothing
  outside the namespace changes, and it ends with the benchmark.
- ``emulated``: every rank delays received messages, by its own clock, until a link with its share
  of the rate would have delivered them. Bytes still cross the real loopback.
- ``none``: the unchanged loopback.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import shutil
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from raymm.kernels.collectives.p2p import Exchange, Pending, Shape

LIMITS = ("namespace", "emulated", "none")
TIMEOUT = timedelta(seconds=180)
_CLONE_NEWNET = 0x40000000  # <sched.h>
# Burst size in bytes: more than the loopback's largest packet (64 KiB).
_BURST = 256 * 1024
# Queue size in bytes: more than all sockets have in flight, so that no packet is dropped.
_QUEUE = 64 * 1024 * 1024


def slow_network(limit: str, gbit: float) -> tuple[str, str]:
    """Limit the loopback of this process and its future children to ``gbit`` Gbit/s.

    Args:
        limit: one of :data:`LIMITS`, or ``auto`` for the first that works.

    Returns:
        The limit in use, and the reason why it is not the namespace (or empty).

    Raises:
        RuntimeError: the namespace was required and is not available.
    """
    if limit not in ("auto", "namespace"):
        return limit, "not asked for"
    try:
        _limited_namespace(gbit)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or b""
        reason = f"{error} {output.decode(errors='replace').strip()}".strip()
        if limit == "namespace":
            raise RuntimeError(f"no network namespace with a limited loopback: {reason}") from error
        return "emulated", reason
    return "namespace", ""


def _limited_namespace(gbit: float) -> None:
    # Check before the move, which cannot be undone: a new namespace's loopback is down.
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise OSError(f"{tool} (iproute2) is not installed")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")
    for command in (
        "ip link set lo up",
        f"tc qdisc add dev lo root tbf rate {round(gbit * 1e6)}kbit burst {_BURST} limit {_QUEUE}",
    ):
        subprocess.run(command.split(), check=True, capture_output=True, timeout=10)


class EmulatedLink(Exchange):
    """Exchange whose messages arrive as over a link of ``bytes_per_s`` into this rank."""

    def __init__(self, group: dist.ProcessGroup, bytes_per_s: float) -> None:
        super().__init__(group)
        self._bytes_per_s, self._free_at = bytes_per_s, 0.0

    def start(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, Shape]],
        device: torch.device,
    ) -> Pending:
        """Start an exchange as :meth:`Exchange.start` does; the link is busy from the posted
        receive on.
        """
        pending = super().start(sends, receives, device)
        size = sum(tensor.nbytes for tensor in pending.received)
        self._free_at = max(self._free_at, time.monotonic()) + size / self._bytes_per_s
        return Pending((*pending.works, _Arrival(self._free_at)), *pending[1:])


class _Arrival:
    """Work handle that completes at a given time."""

    def __init__(self, at: float) -> None:
        self._at = at

    def wait(self) -> None:
        time.sleep(max(0.0, self._at - time.monotonic()))


class Ranks:
    """Processes that wait for work; see :func:`gloo_ranks`."""

    def __init__(self, processes: list[Any], pipes: list[Any]) -> None:
        self._processes, self._pipes = processes, pipes

    def run(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Call ``function(group, **kwargs)`` on every rank and return the results.

        Raises:
            RuntimeError: a rank failed (with its traceback) or did not answer.
        """
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, kwargs))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT.total_seconds()):
                raise RuntimeError(f"rank {rank} did not answer within {TIMEOUT}")
            error, answer = pipe.recv()
            if error:
                raise RuntimeError(f"rank {rank}: {error}")
            answers.append(answer)
        return answers


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT
    )
    while (job := pipe.recv()) is not None:
        module, name, kwargs = job
        try:
            answer = getattr(importlib.import_module(module), name)(dist.group.WORLD, **kwargs)
            pipe.send((None, answer))
        except Exception:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()


@contextlib.contextmanager
def gloo_ranks(size: int) -> Iterator[Ranks]:
    """Start ``size`` single-threaded processes in a gloo group on the loopback.

    They are stopped on exit, by force if they hang.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    context = mp.get_context("spawn")
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
            yield Ranks(processes, pipes)
        finally:
            for pipe in pipes:
                with contextlib.suppress(OSError):
                    pipe.send(None)
            for process in processes:
                process.join(10)
                process.kill()
