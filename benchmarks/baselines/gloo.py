"""Actors in one gloo process group, and a driver that calls each once per step."""

from datetime import timedelta

import ray
import torch.distributed as dist

from benchmarks.baselines.contender import ActorContender, Worker

GROUP_TIMEOUT = timedelta(seconds=120)
HOST = "127.0.0.1"


class GlooWorker(Worker):
    """Rank of the group. Subclasses define a step."""

    def open_store(self) -> int:
        """Start the rendezvous store on a free port and return the port. Called on rank 0."""
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def join(self, port: int, world_size: int) -> None:
        """Join the process group of `world_size` ranks whose store listens on `port`."""
        store = getattr(self, "_store", None) or dist.TCPStore(HOST, port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=self.index, world_size=world_size, timeout=GROUP_TIMEOUT
        )

    def step(self) -> None:
        """Run this rank's part of one step, until all its sends are done."""
        raise NotImplementedError


class GlooContender(ActorContender):
    """Contender whose ranks communicate directly: the driver makes one call per rank and step."""

    def connect(self) -> None:
        port = ray.get(self.actors[0].open_store.remote())
        ray.get([actor.join.remote(port, len(self.actors)) for actor in self.actors])

    def dispatch(self) -> None:
        ray.get([actor.step.remote() for actor in self.actors])
