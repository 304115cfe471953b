"""Interface of contenders, and the actors that most of them use."""

import abc
import os
import time
from typing import Any, ClassVar

import ray
import torch

from benchmarks.baselines.chain import ChainConfig, ChainResult


class Contender(abc.ABC):
    """Runtime that runs the chain over four processes.

    A contender is set up many times, for one configuration after the other. Its processes may live
    from the first `setup` to `close`, and must be idle (blocked, not polling) while paused.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def setup(self, config: ChainConfig) -> None:
        """Make the next `step` run `config`; start the processes if there are none."""

    @abc.abstractmethod
    def dispatch(self) -> None:
        """Run one step from the driver; return when all stages have finished it."""

    @abc.abstractmethod
    def result(self) -> ChainResult:
        """Return the result of the last step."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the processes, if there are any."""

    @abc.abstractmethod
    def pids(self) -> list[int]:
        """Return the ids of its processes, once it is set up."""

    def pause(self) -> None:  # noqa: B027
        """Pause the processes if they poll while they wait. Called before other contenders run."""

    def resume(self) -> None:  # noqa: B027
        """Resume the processes. Called before `setup`, `dispatch` or `result`."""

    def step(self) -> float:
        """Run one step; return seconds of wall time in the driver until all stages are done."""
        start = time.perf_counter()
        self.dispatch()
        return time.perf_counter() - start


class Worker:
    """Base class of the actors: one stage's process."""

    def __init__(self, index: int) -> None:
        torch.set_num_threads(1)
        self.index = index

    def configure(self, config: ChainConfig) -> None:
        """Build the stage of `config`."""
        raise NotImplementedError

    def pid(self) -> int:
        """Return this process's id."""
        return os.getpid()

    def facts(self) -> tuple[float, float]:
        """Return the last step's loss sum (0 except on the last stage) and weight gradient."""
        raise NotImplementedError


class ActorContender(Contender):
    """Contender whose processes are one `worker_class` actor per stage."""

    worker_class: ClassVar[type[Worker]]

    def __init__(self) -> None:
        self.actors: list[Any] = []
        self._pids: list[int] = []

    def setup(self, config: ChainConfig) -> None:
        if not self.actors:
            actor = ray.remote(num_cpus=1)(self.worker_class)
            self.actors = [actor.remote(index) for index in range(config.stages)]
            self._pids = ray.get([worker.pid.remote() for worker in self.actors])
            self.connect()
        ray.get([actor.configure.remote(config) for actor in self.actors])

    def connect(self) -> None:
        """Connect the actors. Called once, after their creation."""

    def pids(self) -> list[int]:
        return self._pids

    def result(self) -> ChainResult:
        losses, gradients = zip(*ray.get([a.facts.remote() for a in self.actors]), strict=True)
        return ChainResult(sum(losses), gradients)

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors, self._pids = [], []
