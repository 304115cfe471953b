"""Callbacks that kill processes of the run, and encoder callbacks that raise."""

import os
import resource
import signal
import threading
from pathlib import Path

import ray
import ray._private.state
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put
from ray.util.placement_group import placement_group, remove_placement_group

from raymm import Callback
from tests.support.run_processors import image
from tests.support.small_disk import SmallDisk

# Seconds that a run waits for resources until it is interrupted.
WAIT_S = 3.0


def kill_actor(number: int, kind: str = "RankActor") -> None:
    """Kill a process of a class of actors, by its index in the order of process numbers."""
    pids = sorted(
        actor["Pid"] for actor in ray._private.state.actors().values()
        if actor["State"] == "ALIVE" and actor["ActorClassName"] == kind
    )
    os.kill(pids[number], signal.SIGKILL)


class KillRanks(Callback):
    """Callback that kills a rank after some steps, the first time that an attempt takes them.

    Args:
        after: steps, one per kill.
        rank: index in the order of process numbers.
        take_cpus: True to also take all CPUs until this process is interrupted, seconds later.
    """

    actor = "RankActor"

    def __init__(self, after: list[int], rank: int = 0, take_cpus: bool = False) -> None:
        self.after, self.rank, self.take_cpus = list(after), rank, take_cpus

    def on_step(self, row):
        if self.after and row["step"] == self.after[0]:
            del self.after[0]
            if self.take_cpus:
                self._take_cpus()
            kill_actor(self.rank, self.actor)

    def _take_cpus(self):
        taken = placement_group([{"CPU": 1.0}] * int(ray.available_resources()["CPU"]))
        assert taken.wait(60)
        waiting = placement_group([{"CPU": 1.0}])  # takes the CPU of the killed rank

        def interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            for group in (taken, waiting):
                remove_placement_group(group)

        threading.Timer(WAIT_S, interrupt).start()


class KillDataWorker(KillRanks):
    """Callback that kills a data worker after some steps."""

    actor = "DataWorker"


class FillDisk(Callback):
    """Callback that fills the disk of a run's folder after a step, and frees it after a later one.
    """

    def __init__(self, folder: str, after: int, until: int) -> None:
        self.disk, self.after, self.until = SmallDisk(Path(folder)), after, until

    def on_step(self, row):
        if row["step"] == self.after:
            self.disk.fill()
        elif row["step"] == self.until:
            self.disk.empty()


def raises_in_ranks(inputs):
    """Fail in the first step of an encoder, but not in the trials before the run."""
    in_worker = ray.get_runtime_context().get_actor_id() is not None
    if in_worker and not any(tensor.is_meta for tensor in inputs.values()):
        raise KeyError("there is no such column")
    return inputs


def has_no_memory_in_ranks(inputs):
    """Raise an out-of-memory error in every rank."""
    in_worker = ray.get_runtime_context().get_actor_id() is not None
    if in_worker and not any(tensor.is_meta for tensor in inputs.values()):
        raise MemoryError("no memory for this image")
    return inputs


# Keys of the cluster that mark the faults already made.
THREADS, FILES = b"raymm tests: no thread", b"raymm tests: no file"
_calls = 0


def make_faults_again():
    """Reset the marks, so that the next run has the faults."""
    for key in (THREADS, FILES):
        _internal_kv_del(key)


def _is_due(key, first_call):
    """Return True if this process makes a fault that no other has made, from its n-th call on."""
    global _calls
    _calls += 1
    return _calls >= first_call and not _internal_kv_put(key, b"made", overwrite=False)


def lacks_a_thread_once(inputs):
    """Fail to start a thread in an encoder, once per run."""
    in_worker = ray.get_runtime_context().get_actor_id() is not None
    if not in_worker or any(tensor.is_meta for tensor in inputs.values()):
        return inputs
    if _is_due(THREADS, first_call=6):
        before = threading.stack_size(2**47)  # more than the address space
        try:
            threading.Thread(target=int).start()
        finally:
            threading.stack_size(before)
    return inputs


def image_without_files_once(path):
    """Run ``run_processors.image``, but run out of file descriptors once per run."""
    if ray.get_runtime_context().get_actor_id() is None or not _is_due(FILES, first_call=9):
        return image(path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        open(path)  # noqa: SIM115
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
