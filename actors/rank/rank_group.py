"""The driver's handle on all ranks: placement, start, steps, failure, shutdown."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from raymm.actors.executor.step_meta import StepMeta, StepResult
from raymm.actors.faults.cluster_observer import ClusterObserver
from raymm.actors.faults.failure import SHOWN_RANKS, accusation, first_line
from raymm.actors.faults.fault_folder import keep
from raymm.actors.faults.flight_recorder import records_text
from raymm.actors.faults.inquiry import Inquiry, inquire, kill_from_outside, look_from_outside
from raymm.actors.faults.lost_processes import ChannelError
from raymm.actors.faults.observed_actor import remote_class
from raymm.actors.faults.stacks import Address
from raymm.actors.placement.placement import ONLY_RANKS, Placement, PlacementOptions
from raymm.actors.rank.rank_actor import RankActor
from raymm.actors.rank.rank_places import ProcessSpec, RankPlace, lost_node_error
from raymm.actors.rank.rank_resources import RankResources, check_capacity
from raymm.actors.rank.step_calls import CallOrder, StepHandle, pack_calls, remember, unpack_result
from raymm.errors import RankFailedError, RankRaisedError, RunFailedError
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.issue_order import Issue
from raymm.scheduler.program.program import Op, Program

# Seconds ranks may take to start, meet and build their stages.
START_TIMEOUT_S = 600.0
# Seconds between two looks at anything but results, while there are none.
LISTEN_S = 1.0


class RankGroup:
    """All ranks of a plan, one Ray actor each.

    Actors have ``max_restarts=0``: a killed process surfaces within tens of milliseconds.

    Args:
        specs: one per rank, in order.
        labels: per rank, what runs there, for error messages (``"vision.0, llm.0"``).
        resources: what each rank reserves.
        placement: what is reserved with them, and how long nodes may take.

    Attributes:
        places: where the ranks run, in order.
        placement: what they have reserved.

    Raises:
        ClusterError: if the cluster cannot hold the ranks, or not in time.
        RankFailedError: if a rank cannot start.
        NodeLostError: if its node is lost meanwhile.
    """

    actor_class: type = RankActor

    def __init__(
        self, specs: Sequence[ProcessSpec], labels: Sequence[str], resources: RankResources,
        placement: PlacementOptions = ONLY_RANKS,
    ) -> None:
        check_capacity(len(specs), resources, placement)
        self._labels = list(labels)
        self._places: list[str] = [""] * len(specs)
        self.places: tuple[RankPlace, ...] = ()
        self._addresses: dict[int, Address] = {}
        self._patience = specs[0].timeout_s
        self._observer: ClusterObserver | None = None
        self._programs: OrderedDict[str, None] = OrderedDict()
        self._ended: str | None = None  # why nothing runs any more
        # Calls of several threads reach all ranks in the same order: else ranks would work on
        # different steps, whose messages are alike.
        self._order = CallOrder()
        self.placement = Placement([resources.bundle()] * len(specs), placement)
        self._actors: list[Any] = []
        try:
            self.placement.wait()
            self._actors = [self._create(spec, i, resources) for i, spec in enumerate(specs)]
            descriptions = self.pids()
            self.places = tuple(
                RankPlace(label, p["host"], p["pid"])
                for label, p in zip(self._labels, descriptions, strict=True)
            )
            self._places = [f", process {p.pid} on {p.host}" for p in self.places]
            self._addresses = {rank: p["address"] for rank, p in enumerate(descriptions)}
            self._observer = ClusterObserver(self.nodes)
            refs = [actor.connect.remote({n: self._actors[n] for n in spec.peers})
                    for actor, spec in zip(self._actors, specs, strict=True)]
            self.wait(refs, timeout=START_TIMEOUT_S)
            self.num_parameters = self.call("build")
        except BaseException:
            self.shutdown()
            raise

    def _create(self, spec: ProcessSpec, index: int, resources: RankResources) -> Any:
        # Without runtime_env a rank takes one of Ray's prestarted workers; it sets its threads.
        remote = remote_class(self.actor_class).options(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            resources=dict(resources.custom) or None,
            max_restarts=0,
            runtime_env={"env_vars": dict(resources.env)} if resources.env else None,
            scheduling_strategy=self.placement.place(index),
        )
        return remote.remote(spec)

    @property
    def places_beside(self) -> tuple[Any, ...]:
        """Where processes beside the ranks go, for Ray's ``scheduling_strategy``."""
        return self.placement.worker_places

    @property
    def nodes(self) -> frozenset[str]:
        """Ray's ids of the nodes with ranks, or with processes beside them."""
        return self.placement.nodes()

    def held(self) -> dict[str, dict[str, float]]:
        """What all of them reserve, by Ray's id of the node."""
        return self.placement.held()

    @property
    def num_ranks(self) -> int:
        return len(self._labels)

    def pids(self) -> list[dict[str, Any]]:
        """Host, process id and device of every rank."""
        return self.call("describe")

    @property
    def ended(self) -> str | None:
        """Why the processes have ended; None while they run."""
        return self._ended

    def check_running(self) -> None:
        """
        Raises:
            RuntimeError: the processes have ended; says why.
        """
        if self._ended is not None:
            raise RuntimeError(f"the processes have ended: {self._ended}; nothing can run any more")

    def call(self, method: str, *args: Any, timeout: float = START_TIMEOUT_S) -> list[Any]:
        """Call a method on every rank with the same arguments; results by rank.

        Args:
            method: its name.
            *args: the same for all.
            timeout: seconds that all of them together may take.

        Raises:
            RankFailedError: if a rank died, raised, or did not answer in time.
            RuntimeError: the processes have ended.
        """
        return self.wait(self.start(method, *args), timeout=timeout)

    def start(self, method: str, *args: Any) -> list[ray.ObjectRef]:
        """:meth:`call` without waiting; references to results, by rank."""
        self.check_running()
        with self._order:
            return [getattr(actor, method).remote(*args) for actor in self._actors]

    def rebuild(self, builders: Sequence[Mapping[str, Any]]) -> None:
        """Replace every rank's stages (same names, other modules); programs are forgotten."""
        self.check_running()
        self._programs.clear()
        self.wait(
            [actor.build.remote(dict(b)) for actor, b in zip(self._actors, builders, strict=True)]
        )

    def load_program(
        self, program: Program, issues: Sequence[Sequence[Issue]], bound: int | None = None
    ) -> str:
        """Hand every rank its instructions, once per distinct program; returns the key.

        Args:
            program, issues, bound: what has been proved, and what the proof says.

        Does not wait: a rank runs its calls in order. Driver and ranks forget the least
        recently used program at the same point of that order.
        """
        self.check_running()
        key = hashlib.sha256(repr(program.ranks).encode()).hexdigest()[:16]
        with self._order:
            if key not in self._programs:
                for actor, *parts in zip(self._actors, program.ranks, issues, strict=True):
                    lists = (list(map(tuple, part)) for part in parts)
                    actor.load_program.remote(key, *lists, bound)
            remember(self._programs, key, None)
        return key

    def touch_program(self, key: str) -> None:
        """Note that a loaded program is used again."""
        remember(self._programs, key, None)

    def submit(
        self, key: str, meta: StepMeta, inputs: Sequence[Sequence[tuple[StageId, int, Any]]]
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
        calls = pack_calls(key, meta, inputs)
        with self._order:
            refs = [
                actor.run_packed_step.remote(*call)
                for actor, call in zip(self._actors, calls, strict=True)
            ]
        return StepHandle(self, refs, unpack_result)

    def run_optimizer_ops(self, ops: Sequence[Op]) -> list[StepResult]:
        """Run collective ops on all ranks."""
        return self.call("run_optimizer_ops", list(ops))

    def wait(
        self, refs: Sequence[ray.ObjectRef], ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Results of one call per rank; notices a dead rank while others still wait for it.

        Args:
            refs: one per rank.
            ranks: which rank each is of; all in order if None.
            timeout: seconds without a result. None: until no rank has begun another instruction
                for as long as a rank may wait for another (``timeout_s``).

        Raises:
            RankFailedError: if a rank died, or nothing came in time.
            RankRaisedError: if what a rank runs raised.
            NodeLostError: a node with processes of the run is gone.
            ClusterLostError: the server that knows the cluster is, or the driver's own node.
        """
        ranks = list(range(len(refs))) if ranks is None else list(ranks)
        pending = dict(zip(refs, ranks, strict=True))
        results: dict[int, Any] = {}
        patience = self._patience if timeout is None else timeout
        due = time.monotonic() + patience
        while pending:
            self.check_cluster()
            try:
                # All at once; ends early where one of them failed.
                rest = ray.get([*pending], timeout=LISTEN_S)
                results.update(zip(pending.values(), rest, strict=True))
                break
            except GetTimeoutError:
                ready, _ = ray.wait([*pending], num_returns=len(pending), timeout=0)
            except RayError:
                ready, _ = ray.wait([*pending], num_returns=1, timeout=LISTEN_S)
            if not ready:
                if time.monotonic() >= due:
                    due = time.monotonic() + self._check_progress(pending, timeout)
                continue
            due = time.monotonic() + patience
            for ref in ready:
                rank = pending.pop(ref)
                results[rank] = self._fetch(rank, ref, pending)
        return [results[rank] for rank in ranks]

    def _fetch(self, rank: int, ref: ray.ObjectRef, pending: Mapping[Any, int]) -> Any:
        """The result of a rank's call that has ended, while others are pending."""
        try:
            return ray.get(ref)
        except RayActorError as error:
            self._died(rank, error)
        except RayTaskError as error:
            self._raised(rank, error, pending)
        except RayError as error:  # its input was lost with the data worker that held it
            self._fail(f"{self._name(rank)} failed: {first_line(error)}", error)

    def check_cluster(self, error: RayActorError | None = None) -> None:
        """
        Args:
            error: how a process of the run died that may have gone with its node.

        Raises:
            NodeLostError: a node with processes of the run is gone.
            ClusterLostError: the server that knows the cluster is, or the driver's own node.
        """
        if self._observer is None or self._observer.lost is None:
            return
        lost_nodes = self._observer.lost_nodes
        ranks = [rank for rank, process in self._addresses.items() if process.node in lost_nodes]
        had = f". It had {', '.join(self._name(rank) for rank in ranks)}" if ranks else ""
        kind = lost_node_error(lost_nodes, error is not None and error.preempted)
        self._fail(f"{self._observer.lost}{had}", error, kind=kind)

    def look_at_nodes(self) -> None:
        """Look at once at all nodes with processes of the run: one of these has died.

        Raises:
            NodeLostError, ClusterLostError: as of :meth:`check_cluster`.
        """
        if self._observer is not None:
            for node in self.nodes:
                self._observer.look_at_node(node)
            self.check_cluster()

    def _check_progress(self, pending: Mapping[Any, int], timeout: float | None) -> float:
        """Seconds to wait on before this is to be asked again.

        Raises:
            RankFailedError: nothing goes on.
        """
        inquiry = inquire(dict(enumerate(self._actors)))
        if timeout is None and not inquiry.dead and inquiry.still() < self._patience:
            return self._patience - inquiry.still()
        waiting = ", ".join(self._name(rank) for rank in pending.values())
        reason = f"no answer within {timeout:g} s from {waiting}" if timeout is not None else (
            f"no rank has begun another instruction for {self._patience:g} s (timeout_s; if one "
            "may take longer, raise it)"
        )
        self._blame(inquiry, reason)

    def _died(self, rank: int, error: RayActorError) -> None:
        if self._observer is not None and rank in self._addresses:
            self._observer.look_at_node(self._addresses[rank].node)
            self.check_cluster(error)
        text = str(error)
        kind = RankRaisedError if error.actor_init_failed else RankFailedError
        looks = look_from_outside(dict(list(self._addresses.items())[:SHOWN_RANKS]))
        names = list(map(self._name, range(len(self._labels))))
        said = f"{names[rank]} died: {first_line(error)}{records_text(names, looks)}"
        stacks = {f"rank-{n}.txt": look.stacks for n, look in looks.items() if look.stacks}
        self._fail(said, error, {**stacks, f"rank-{rank}.txt": text}, kind)

    def _raised(self, rank: int, error: RayTaskError, pending: Mapping[Any, int]) -> None:
        if isinstance(error.cause, ChannelError):
            inquiry = inquire(dict(enumerate(self._actors)))
            rank, error = self._own_failure(pending) or (rank, error)
        cause = error.cause if error.cause is not None else error
        reason = f"{type(cause).__name__}: {cause}"
        if isinstance(cause, ChannelError):
            self._blame(inquiry, f"{self._name(rank)} failed: {reason}", error)
        if not isinstance(cause, ValueError):
            reason += f"\n{error}"  # nobody expected it: show where it came from
        # A device that fails, another one may not.
        kind = RankFailedError if isinstance(cause, torch.AcceleratorError) else RankRaisedError
        texts = {f"rank-{rank}.txt": str(error)}
        self._fail(f"{self._name(rank)} failed: {reason}", error, texts, kind)

    def _own_failure(self, pending: Mapping[Any, int]) -> tuple[int, RayTaskError] | None:
        """A rank that has raised what is its own, not that a connection was lost."""
        ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for ref in ready:
            try:
                ray.get(ref)
            except RayTaskError as error:
                if not isinstance(error.cause, ChannelError):
                    return pending[ref], error
            except RayError:
                continue
        return None

    def _blame(self, inquiry: Inquiry, reason: str, error: BaseException | None = None) -> NoReturn:
        """End with the one that the others wait for, and with what each was doing."""
        silent = [number for number in inquiry.silent if number in self._addresses]
        looks = look_from_outside(self._addresses, end=silent)
        names = list(map(self._name, range(len(self._labels))))
        message, texts = accusation(names, inquiry, looks, reason, self._patience / 2)
        self._fail(message, error, texts)

    def _fail(
        self, message: str, error: BaseException | None, texts: Mapping[str, str] | None = None,
        kind: Callable[[str], RunFailedError] = RankFailedError,
    ) -> NoReturn:  # fmt: skip
        self._ended = message.partition("\n")[0]
        if texts:
            message += f"\ntracebacks and stacks: {keep({'error.txt': message, **texts})}"
        self.shutdown()
        raise kind(message) from error

    def _name(self, rank: int) -> str:
        return f"rank {rank} (stages {self._labels[rank]}{self._places[rank]})"

    def shutdown(self) -> None:
        """End all ranks and give their resources back."""
        self._ended = self._ended or "they were shut down"
        if self._observer is not None:
            self._observer.stop()
            if self._observer.gcs_is_lost:  # Ray's own calls would never return
                kill_from_outside(self._addresses, everywhere=False)
                return
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
        self.placement.remove()
