"""Spares that die while they wait."""

import os
import signal
import time

import ray

from raymm.actors.recovery.spares import Spares

PATIENCE_S = 60


class Waits:
    """Fake of a rank's actor."""

    def where(self):
        return None

    def pid(self):
        return os.getpid()


def test_a_dead_spare_is_replaced(ray_cluster):
    started = []

    def start(place):
        actor = ray.remote(num_cpus=0)(Waits).remote()
        started.append(place)
        return actor, actor.pid.remote()

    spares = Spares(["here", "there"])
    spares.restock(start)
    pids = [ray.get(spare.warm, timeout=PATIENCE_S) for spare in spares._waiting]
    for _ in range(3):
        spares.look()
        spares.restock(start)
        time.sleep(0.2)
    assert started == ["here", "there"] and spares.has_warm()
    os.kill(pids[1], signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while len(started) == 2 and time.monotonic() < deadline:
        spares.look()
        spares.restock(start)
        time.sleep(0.1)
    assert started == ["here", "there", "there"] and len(spares.actors) == 2
    taken = spares.take(2)
    assert taken and taken[0].place == "here"
