"""The driver's handle on all ranks: placement, start, steps, failure, shutdown."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import (
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raymm.actors.channel import ChannelError
from raymm.actors.executor import StepMeta, StepResult
from raymm.actors.rank_actor import RankActor, RankSpec, remember
from raymm.scheduler.program import Op, Program
from raymm.scheduler.timeline import Span, Timeline

# Seconds a placement group may take to be scheduled once the cluster is known to be big enough.
PLACEMENT_TIMEOUT_S = 120.0
# Seconds ranks may take to start, meet and build their stages.
START_TIMEOUT_S = 600.0
# A rank whose neighbour dies may report a broken connection first: seconds to wait for Ray
# to say who died.
DEATH_GRACE_S = 10.0


# What a rank reports of a step.
Result = TypeVar("Result")


class ClusterError(RuntimeError):
    """The cluster lacks what the plan needs; says what it has."""


class RankFailedError(RuntimeError):
    """A rank died or raised. Names the module, stage and rank."""


@dataclass(frozen=True)
class RankResources:
    """What one rank reserves in Ray: logical CPUs, GPUs, custom resources."""

    cpus: float = 1.0
    gpus: float = 0.0
    custom: Mapping[str, float] = field(default_factory=dict)

    def bundle(self) -> dict[str, float]:
        bundle = {"CPU": self.cpus, "GPU": self.gpus, **self.custom}
        return {name: amount for name, amount in bundle.items() if amount > 0}


def check_capacity(num_ranks: int, resources: RankResources, worker_cpus: float = 0.0) -> None:
    """Compare a plan's needs with the connected cluster.

    Args:
        num_ranks: of the plan.
        resources: what each rank reserves.
        worker_cpus: CPUs that data workers reserve beside the ranks, all together.

    Raises:
        ClusterError: if the cluster, even when idle, cannot hold the ranks and data workers.
    """
    has = ray.cluster_resources()
    for name, amount in resources.bundle().items():
        needed = amount * num_ranks
        workers = worker_cpus if name == "CPU" else 0.0
        if needed + workers > has.get(name, 0.0) + 1e-9:
            beside = f", and data workers {workers:g} {name} beside them" if workers else ""
            raise ClusterError(
                f"the plan has {num_ranks} ranks of {amount:g} {name} each, {needed:g} {name} in "
                f"all{beside}; the cluster has {has.get(name, 0.0):g} {name}. Use fewer ranks "
                "(parallel.*.pp, parallel.*.ranks), reserve less for each (resources), or connect "
                "to a larger cluster"
            )


class StepHandle(Generic[Result]):
    """A submitted step. ``result()`` waits for it."""

    def __init__(self, group: RankGroup, refs: list[ray.ObjectRef]) -> None:
        self._group = group
        self._refs = refs

    def result(self) -> list[Result]:
        """Every rank's result, by rank.

        Raises:
            RankFailedError: if a rank died or raised.
        """
        return self._group.wait(self._refs)


class RankGroup:
    """All ranks of a plan, one Ray actor each.

    Actors are created with ``max_restarts=0``: a killed process then surfaces within tens
    of milliseconds.

    Args:
        specs: one per rank, in order.
        labels: per rank, what runs there, for error messages (``"vision.0, llm.0"``).
        resources: what each rank reserves.

    Raises:
        ClusterError: if the cluster cannot hold the ranks.
        RankFailedError: if a rank cannot start.
    """

    actor_class: type = RankActor

    def __init__(
        self, specs: Sequence[RankSpec], labels: Sequence[str], resources: RankResources
    ) -> None:
        check_capacity(len(specs), resources)
        self._labels = list(labels)
        self._places: list[str] = [""] * len(specs)
        self._programs: OrderedDict[str, None] = OrderedDict()
        self._ended: str | None = None  # why nothing runs any more
        self._placement = placement_group([resources.bundle()] * len(specs), strategy="PACK")
        self._actors: list[Any] = []
        try:
            deadline = time.monotonic() + PLACEMENT_TIMEOUT_S
            # In slices, so that Ctrl-C is heard; not ready(), whose task takes a worker process.
            while not self._placement.wait(1.0):
                if time.monotonic() > deadline:
                    free = ray.available_resources()
                    raise ClusterError(
                        f"{len(specs)} ranks of {resources.bundle()} could not be placed within "
                        f"{PLACEMENT_TIMEOUT_S:g} s; free in the cluster now: {free}"
                    )
            self._actors = [self._create(spec, i, resources) for i, spec in enumerate(specs)]
            address, port = self.wait([self._actors[0].rendezvous.remote()], ranks=[0])[0]
            self._places = [f", process {p['pid']} on {p['host']}" for p in self.pids()]
            self.call("connect", address, port)
            self.num_parameters = self.call("build")
        except BaseException:
            self.shutdown()
            raise

    def _create(self, spec: RankSpec, index: int, resources: RankResources) -> Any:
        # No runtime_env: a rank then takes one of Ray's prestarted workers. Its threads are set
        # by the actor itself.
        remote = ray.remote(self.actor_class).options(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            resources=dict(resources.custom) or None,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._placement, placement_group_bundle_index=index
            ),
        )
        return remote.remote(spec)

    @property
    def num_ranks(self) -> int:
        return len(self._labels)

    def pids(self) -> list[dict[str, Any]]:
        """Host, process id and device of every rank."""
        return self.call("describe")

    def check_running(self) -> None:
        """
        Raises:
            RuntimeError: the processes have ended; says why.
        """
        if self._ended is not None:
            raise RuntimeError(f"the processes have ended: {self._ended}; nothing can run any more")

    def call(self, method: str, *args: Any, timeout: float = START_TIMEOUT_S) -> list[Any]:
        """Call a method on every rank with the same arguments; results by rank.

        Raises:
            RankFailedError: if a rank died, raised, or did not answer in time.
            RuntimeError: the processes have ended.
        """
        self.check_running()
        refs = [getattr(actor, method).remote(*args) for actor in self._actors]
        return self.wait(refs, timeout=timeout)

    def rebuild(self, builders: Sequence[Mapping[str, Any]]) -> None:
        """Replace every rank's stages (same names, other modules); programs are forgotten."""
        self.check_running()
        self._programs.clear()
        self.wait(
            [actor.build.remote(dict(b)) for actor, b in zip(self._actors, builders, strict=True)]
        )

    def load_program(self, program: Program) -> str:
        """Hand every rank its instructions, once per distinct program; returns the key.

        Does not wait: a rank runs its calls in order. Driver and ranks forget the least
        recently used program at the same point of that order.
        """
        self.check_running()
        key = hashlib.sha256(repr(program.ranks).encode()).hexdigest()[:16]
        if key not in self._programs:
            for actor, instructions in zip(self._actors, program.ranks, strict=True):
                actor.load_program.remote(key, [tuple(i) for i in instructions])
        remember(self._programs, key, None)
        return key

    def touch_program(self, key: str) -> None:
        """Note that a loaded program is used again."""
        remember(self._programs, key, None)

    def submit(
        self,
        key: str,
        meta: StepMeta,
        inputs: Sequence[Sequence[tuple[str, int, Any]]],
    ) -> StepHandle[StepResult]:
        """Start a step on all ranks; returns at once. Steps run in submission order.

        Args:
            key: from :meth:`load_program`.
            meta: the step's metadata.
            inputs: per rank, (stage, microbatch, dict or ObjectRef of a dict).

        Raises:
            RuntimeError: the processes have ended.
        """
        self.check_running()
        refs = []
        for actor, rows in zip(self._actors, inputs, strict=True):
            layout = [(stage, microbatch) for stage, microbatch, _ in rows]
            refs.append(actor.run_step.remote(key, meta, layout, *(data for *_, data in rows)))
        return StepHandle(self, refs)

    def run_epilogue(self, ops: Sequence[Op]) -> list[StepResult]:
        """Run collective ops on all ranks."""
        return self.call("run_epilogue", list(ops))

    def wait(
        self,
        refs: Sequence[ray.ObjectRef],
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Results of one call per rank; notices a dead rank while others still wait for it.

        Raises:
            RankFailedError: if a rank died, raised, or ``timeout`` seconds passed.
        """
        ranks = list(range(len(refs))) if ranks is None else list(ranks)
        pending = dict(zip(refs, ranks, strict=True))
        results: dict[int, Any] = {}
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=timeout)
            if not ready:
                waiting = ", ".join(self._name(rank) for rank in pending.values())
                self._ended = f"no answer within {timeout:g} s from {waiting}"
                self.shutdown()
                raise RankFailedError(self._ended)
            rank = pending.pop(ready[0])
            try:
                results[rank] = ray.get(ready[0])
            except RayActorError as error:
                self._fail(f"{self._name(rank)} died: {_first_line(error)}", error)
            except RayTaskError as error:
                self._raised(rank, error, pending)
            except RayError as error:  # its input was lost with the data worker that held it
                self._fail(f"{self._name(rank)} failed: {_first_line(error)}", error)
        return [results[rank] for rank in ranks]

    def _raised(self, rank: int, error: RayTaskError, pending: dict[ray.ObjectRef, int]) -> None:
        if isinstance(error.cause, ChannelError):
            rank, error = self._first_failure(rank, error, pending)
        cause = error.cause if error.cause is not None else error
        reason = f"{type(cause).__name__}: {cause}"
        if not isinstance(cause, ChannelError | ValueError):
            reason += f"\n{error}"  # nobody expected it: show where it came from
        self._fail(f"{self._name(rank)} failed: {reason}", error)

    def _first_failure(
        self, rank: int, error: RayTaskError, pending: dict[ray.ObjectRef, int]
    ) -> tuple[int, RayTaskError]:
        """Who broke the connection that ``rank`` reports, if it was not ``rank`` itself.

        A rank that has answered already is asked once more: it may have died since.
        """
        asked = dict(pending)
        for other in set(range(len(self._actors))) - {rank, *pending.values()}:
            asked[self._actors[other].describe.remote()] = other
        deadline = time.monotonic() + DEATH_GRACE_S
        while asked and (left := deadline - time.monotonic()) > 0:
            ready, _ = ray.wait(list(asked), num_returns=1, timeout=left)
            for ref in ready:
                other = asked.pop(ref)
                try:
                    ray.get(ref)
                except RayActorError as death:
                    self._fail(f"{self._name(other)} died: {_first_line(death)}", death)
                except RayTaskError as raised:
                    if not isinstance(raised.cause, ChannelError):
                        return other, raised
        return rank, error

    def _fail(self, message: str, error: BaseException) -> None:
        self._ended = message.partition("\n")[0]
        self.shutdown()
        raise RankFailedError(message) from error

    def _name(self, rank: int) -> str:
        return f"rank {rank} (stages {self._labels[rank]}{self._places[rank]})"

    def shutdown(self) -> None:
        """End all ranks and give their resources back."""
        self._ended = self._ended or "they were shut down"
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
        remove_placement_group(self._placement)


def _first_line(error: BaseException) -> str:
    """What a Ray error says, without its many lines of context."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, OutOfMemoryError):  # Ray's memory monitor chose this process
        return " ".join(lines[:2]).partition(" Ray killed")[0]
    if "creation task" in str(error):
        return f"it could not start: {lines[-1]}"
    for line in lines:
        if "died because" in line or "cause" in line.lower() or "Worker" in line:
            return line.partition(" Some common causes")[0]
    return lines[0] if lines else type(error).__name__


def measured_timeline(results: Sequence[StepResult]) -> Timeline:
    """All ranks' spans as one timeline that starts at 0."""
    starts = [span[3] for result in results for span in result.spans]
    origin = min(starts, default=0.0)
    return Timeline(
        tuple(
            Span(rank, op, stage, microbatch, start - origin, end - origin, *more)
            for rank, result in enumerate(results)
            for op, stage, microbatch, start, end, *more in result.spans
        ),
        len(results),
    )
