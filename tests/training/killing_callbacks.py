"""Callbacks that kill processes of their own run, and an encoder callback that raises."""

import os
import signal
import threading

import ray
import ray._private.state
from ray.util.placement_group import placement_group, remove_placement_group

from raymm import Callback

# Seconds that a run waits for room, until it is interrupted.
WAIT_S = 3.0


def kill_actor(number: int, kind: str = "RankActor") -> None:
    """Kill a process of a class of actors, in the order of process numbers."""
    pids = sorted(
        actor["Pid"] for actor in ray._private.state.actors().values()
        if actor["State"] == "ALIVE" and actor["ActorClassName"] == kind
    )
    os.kill(pids[number], signal.SIGKILL)


class KillRanks(Callback):
    """Kills a rank after each of some steps, the first time that they are taken in an attempt.

    Args:
        after: steps, one for each time.
        rank: which, in the order of process numbers.
        take_cpus: take all CPUs, too, until this process is interrupted, seconds later.
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
        waiting = placement_group([{"CPU": 1.0}])  # for that of the rank

        def interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            for group in (taken, waiting):
                remove_placement_group(group)

        threading.Timer(WAIT_S, interrupt).start()


class KillDataWorker(KillRanks):
    """The same of the data worker."""

    actor = "DataWorker"


def raises_in_ranks(inputs):
    """Of an encoder: what is tried before the run goes through, and its first step does not."""
    in_worker = ray.get_runtime_context().get_actor_id() is not None
    if in_worker and not any(tensor.is_meta for tensor in inputs.values()):
        raise KeyError("there is no such column")
    return inputs


def has_no_memory_in_ranks(inputs):
    """The same of one for which there is no memory, whenever it is tried."""
    in_worker = ray.get_runtime_context().get_actor_id() is not None
    if in_worker and not any(tensor.is_meta for tensor in inputs.values()):
        raise MemoryError("no memory for this image")
    return inputs
