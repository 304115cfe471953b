"""Driver's handle on all ranks: placement, start, steps, failures and shutdown."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError

from raymm.actors.executor.step_meta import StepMeta, StepResult
from raymm.actors.faults.cluster_observer import ClusterObserver
from raymm.actors.faults.inquiry import BEAT_S, inquire, kill_from_outside
from raymm.actors.faults.observed_actor import remote_class
from raymm.actors.optimizer.optimizer import Progress
from raymm.actors.placement.placement import ONLY_RANKS, Placement, PlacementOptions
from raymm.actors.rank.rank_actor import RankActor
from raymm.actors.rank.rank_resources import RankResources, check_capacity
from raymm.actors.rank.rank_spec import ProcessSpec, RankPlace
from raymm.actors.rank.step_calls import (
    CallOrder,
    StepHandle,
    keep_recent,
    pack_calls,
    unpack_result,
)
from raymm.actors.recovery.observed_ranks import ObservedRanks, end, leave
from raymm.actors.recovery.snapshots import keepers
from raymm.errors import ClusterError, Loss, RunFailedError
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.issue_order import Issue
from raymm.scheduler.program.program import Op, Program


class Spare(NamedTuple):
    """Spare actor with its place; ``warm`` is ready once it has imported everything that ranks
    need."""

    actor: Any
    place: Any
    warm: ray.ObjectRef


class Spares:
    """Warm processes, each in its own place."""

    def __init__(self, places: Sequence[Any] = ()) -> None:
        self._free = list(places)
        self._waiting: list[Spare] = []
        # Pending query of each spare's state, by its `warm` reference.
        self._asked: dict[ray.ObjectRef, ray.ObjectRef] = {}

    def restock(self, start: Callable[[Any], tuple[Any, ray.ObjectRef]]) -> None:
        """Start a spare process in every free place. Does not wait.

        Args:
            start: starts a process in a place; returns its actor and the reference that is ready
                once it is warm. Not stored: it is a method of the spares' owner, which would then
                never be freed.
        """
        for bundle in self._free:
            actor, warm = start(bundle)
            self._waiting.append(Spare(actor, bundle, warm))
        self._free.clear()

    def look(self) -> None:
        """Remove spares that have died, and free their places. Does not wait: a spare that died
        after the previous check may be found at the next one."""
        for spare in list(self._waiting):
            if spare.warm not in self._asked:
                self._asked[spare.warm] = spare.actor.where.remote()
            elif (error := _ended(self._asked[spare.warm])) is not None:
                del self._asked[spare.warm]
                if isinstance(error, RayActorError):
                    self._waiting.remove(spare)
                    self._free.append(spare.place)

    def take(self, most: int) -> list[Spare]:
        """Remove and return up to ``most`` warm spares that answer. Places of dead spares become
        free."""
        warm = [spare for spare in self._waiting if _is_there(spare.warm)]
        answers = inquire({number: spare.actor for number, spare in enumerate(warm)}, BEAT_S)
        for number in answers.dead:
            self._waiting.remove(warm[number])
            self._asked.pop(warm[number].warm, None)
            self._free.append(warm[number].place)
        chosen = [warm[number] for number in sorted(answers.reports)[:most]]
        for spare in chosen:
            self._waiting.remove(spare)
            self._asked.pop(spare.warm, None)
        return chosen

    def has_warm(self) -> bool:
        """Return True if a warm spare exists. It may have died since the last check."""
        return any(_is_there(spare.warm) for spare in self._waiting)

    def give(self, place: Any) -> None:
        self._free.append(place)

    @property
    def actors(self) -> list[Any]:
        return [spare.actor for spare in self._waiting]


def _ended(ref: ray.ObjectRef) -> RayError | Literal[True] | None:
    """Return the error of a finished call, or True for success; None if the call is pending."""
    if not ray.wait([ref], timeout=0)[0]:
        return None
    try:
        ray.get(ref)
    except RayError as error:
        return error
    return True


def _is_there(ref: ray.ObjectRef) -> bool:
    ready, _ = ray.wait([ref], timeout=0)
    try:
        return bool(ready and (ray.get(ref), True))
    except RayError:
        return True  # dead; the next query detects it


# Timeout for ranks to start, connect and build their stages, in seconds.
START_TIMEOUT_S = 600.0


class RankGroup(ObservedRanks):
    """All ranks of a plan, one Ray actor each.

    Actors have ``max_restarts=0``, so a killed process is reported within tens of milliseconds.

    Args:
        labels: stages of each rank, for error messages (``"vision.0, llm.0"``).
        placement: resources that are reserved in addition, and how long nodes may take to arrive.

    Raises:
        ClusterError: the cluster cannot hold the ranks, or not in time.
        RankFailedError: a rank cannot start.
        RunFailedError: a rank's node was lost during the start.
    """

    actor_class: type = RankActor
    renews = True

    def __init__(
        self, specs: Sequence[ProcessSpec], labels: Sequence[str], resources: RankResources,
        placement: PlacementOptions = ONLY_RANKS,
    ) -> None:
        check_capacity(len(specs), resources, placement)
        super().__init__(labels, specs[0].timeout_s)
        self._specs, self._reserved = list(specs), resources
        self.places: tuple[RankPlace, ...] = ()
        self._spares = Spares()
        self._programs: OrderedDict[str, None] = OrderedDict()
        # Calls from several threads must reach all ranks in the same order. Otherwise ranks would
        # work on different steps and could not distinguish their messages.
        self._order = CallOrder()
        self.placement = Placement([resources.bundle()] * len(specs), placement)
        try:
            self.placement.wait()
            self._rank_places = [self.placement.place(rank) for rank in range(len(specs))]
            for spec, place in zip(specs, self._rank_places, strict=True):
                self._actors.append(self._create(spec, place))  # shutdown() ends those so far
            self._describe()
            self._observe(self.nodes)
            refs = [actor.connect.remote({n: self._actors[n] for n in spec.peers})
                    for actor, spec in zip(self._actors, specs, strict=True)]
            self.wait(refs, timeout=START_TIMEOUT_S)
            self.num_parameters = self.call("build")
            self._spares = Spares(self.placement.spare_places)
            self._spares.restock(self._start_spare)
        except BaseException:
            self.shutdown()
            raise

    def _describe(self) -> None:
        descriptions = self.wait([actor.describe.remote() for actor in self._actors],
                                 timeout=START_TIMEOUT_S)
        self.places = tuple(
            RankPlace(label, p["host"], p["pid"])
            for label, p in zip(self._labels, descriptions, strict=True)
        )
        self._places = [f", process {p.pid} on {p.host}" for p in self.places]
        self._addresses = {rank: p["address"] for rank, p in enumerate(descriptions)}

    def _create(self, spec: ProcessSpec, place: Any) -> Any:
        resources = self._reserved
        # Without runtime_env a rank takes one of Ray's prestarted workers; the rank sets its own
        # threads.
        remote = remote_class(self.actor_class).options(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            resources=dict(resources.custom) or None,
            max_restarts=0,
            runtime_env={"env_vars": dict(resources.env)} if resources.env else None,
            scheduling_strategy=place,
        )
        return remote.remote(spec)

    def _start_spare(self, place: Any) -> tuple[Any, Any]:
        """Start a spare process. Return its actor and the reference that is ready when the process
        is warm."""
        kinds = {tuple(spec.modules): spec for spec in self._specs}
        actor = self._create(self._specs[0].unbuilt(), place)
        return actor, actor.warm_up.remote(*kinds.values())

    def _replace(self, gone: Sequence[int]) -> None:
        spares = self._spares.take(len(gone))
        for rank, spare in zip(gone, spares, strict=False):
            self._spares.give(self._rank_places[rank])
            self._actors[rank], self._rank_places[rank] = spare.actor, spare.place
        for rank in gone[len(spares):]:
            self._actors[rank] = self._create(self._specs[rank], self._rank_places[rank])
        replaced = list(gone[:len(spares)])
        # Before other processes send the keys that are meant for that rank.
        refs = [self._actors[rank].take_place.remote(self._specs[rank]) for rank in replaced]
        self.wait(refs, replaced, START_TIMEOUT_S)

    def _beat(self) -> None:
        super()._beat()
        if self._interrupted is None:  # otherwise lost ranks are replaced first
            self._spares.look()
            self._spares.restock(self._start_spare)

    def has_spare(self) -> bool:
        """Return True if a warm spare process can replace a rank at once."""
        return self._spares.has_warm()

    @property
    def places_beside(self) -> tuple[Any, ...]:
        """Return Ray scheduling strategies for processes next to the ranks, such as data
        workers."""
        return self.placement.worker_places

    @property
    def nodes(self) -> frozenset[str]:
        """Return Ray ids of the nodes with ranks or with processes next to them."""
        return self.placement.nodes()

    def held(self) -> dict[str, dict[str, float]]:
        """Return the resources that all processes reserve, by Ray node id."""
        return self.placement.held()

    @property
    def num_ranks(self) -> int:
        return len(self._labels)

    def pids(self) -> list[dict[str, Any]]:
        """Return host, process id, device and address of every rank."""
        return self.call("describe")

    def call(self, method: str, *args: Any, timeout: float = START_TIMEOUT_S) -> list[Any]:
        """Call a method on every rank with the same arguments; return the results by rank.

        Args:
            timeout: seconds that all calls together may take.

        Raises:
            RankFailedError: a rank died, raised an error, or did not answer in time.
            RuntimeError: the processes have ended.
        """
        return self.wait(self.start(method, *args), timeout=timeout)

    def start(self, method: str, *args: Any, returns: int = 1) -> list[Any]:
        """Call a method on every rank without waiting; return references to the results, by rank.
        With ``returns`` above 1, each result is a list of that many references to its parts."""
        self.check_running()
        with self._order:
            calls = [getattr(actor, method) for actor in self._actors]
            if returns > 1:
                return [call.options(num_returns=returns).remote(*args) for call in calls]
            return [call.remote(*args) for call in calls]

    def call_each(self, method: str, args: Sequence[Any]) -> list[Any]:
        """Call a method with a different argument on each rank; see :meth:`call`."""
        self.check_running()
        with self._order:
            refs = [
                getattr(actor, method).remote(arg)
                for actor, arg in zip(self._actors, args, strict=True)
            ]
        return self.wait(refs, timeout=START_TIMEOUT_S)

    def rebuild(self, builders: Sequence[Mapping[str, Any]]) -> None:
        """Replace every rank's stages by other modules with the same names, and drop all
        programs."""
        self.check_running()
        self._programs.clear()
        self.wait(
            [actor.build.remote(dict(b)) for actor, b in zip(self._actors, builders, strict=True)]
        )

    def load_program(
        self, program: Program, issues: Sequence[Sequence[Issue]], bound: int | None = None
    ) -> str:
        """Send every rank its instructions, once per distinct program; return the program's key.

        Does not wait: each rank runs its calls in order. Driver and ranks evict the least recently
        used program at the same point of that order.

        Args:
            program, issues, bound: a verified program, and results of ``check_program``.
        """
        self.check_running()
        key = hashlib.sha256(repr(program.ranks).encode()).hexdigest()[:16]
        with self._order:
            if key not in self._programs:
                for actor, *arguments in zip(self._actors, program.ranks, issues, strict=True):
                    lists = (list(map(tuple, argument)) for argument in arguments)
                    actor.load_program.remote(key, *lists, bound)
            keep_recent(self._programs, key, None)
        return key

    def touch_program(self, key: str) -> None:
        keep_recent(self._programs, key, None)

    def submit(
        self, key: str, meta: StepMeta, inputs: Sequence[Sequence[tuple[StageId, int, Any]]]
    ) -> StepHandle[StepResult]:
        """Start a step on all ranks without waiting. Steps run in submission order.

        Args:
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
        return self.call("run_optimizer_ops", list(ops))

    def renew(self) -> list[Progress | None]:
        """Replace lost ranks and reconnect all ranks after a failure that some processes survived.

        Survivors keep their stages, parameters and optimizer state. Gradients of the interrupted
        step and all programs are dropped.

        Returns:
            Progress of each rank; None for new processes, which are in the run's initial state.

        Raises:
            RankFailedError: another rank was lost meanwhile; the call may be repeated.
        """
        self._leave_nodes()
        failure, ranks = self._interrupted, dict(enumerate(self._actors))
        lost = frozenset() if failure is None or failure.lost is None else failure.lost
        staying = {rank: actor for rank, actor in ranks.items() if rank not in lost}
        # Kill lost ranks first: a survivor that waits for one of them fails once the connection is
        # closed.
        end({rank: ranks[rank] for rank in lost}, self._addresses)
        progress_of = leave(staying, self._generation)
        gone = [rank for rank in ranks if rank not in progress_of]
        end({rank: ranks[rank] for rank in gone if rank not in lost}, self._addresses)
        for rank in gone:
            self._addresses.pop(rank, None)
            self._heartbeats.replaced(rank)
        self._replace(gone)
        self._describe()  # so that a process that hangs during its start is detected
        self._generation += 1
        refs = []
        for rank, (actor, spec) in enumerate(zip(self._actors, self._specs, strict=True)):
            meet = actor.renew if rank in progress_of else actor.connect
            peers = {n: self._actors[n] for n in spec.peers}
            refs.append(meet.remote(peers, self._generation))
        self.wait(refs, timeout=START_TIMEOUT_S)
        self.wait([self._actors[rank].build.remote() for rank in gone], gone, START_TIMEOUT_S)
        if self._observer is not None and self.nodes != self._observer.nodes:
            self._observe(self.nodes)  # the nodes lost now no longer matter
        self._programs.clear()
        self._interrupted = None
        self._spares.restock(self._start_spare)
        return [progress_of.get(rank) for rank in ranks]

    def _leave_nodes(self) -> None:
        """Move the places on lost nodes to other nodes.

        Raises:
            RunFailedError: no other nodes are available; the processes have ended.
        """
        lost = frozenset() if self._observer is None else self._observer.lost_nodes
        if not lost:
            return
        for rank in [rank for rank, address in self._addresses.items() if address.node in lost]:
            del self._addresses[rank]  # its processes cannot be reached
        try:
            self.placement.leave(lost)
        except ClusterError as error:
            self._ended = str(error)
            self.shutdown()
            raise RunFailedError(
                f"a node is lost, and {error}", lost=Loss.NODE, nodes=lost
            ) from error
        self._observe(self.nodes)

    def _observe(self, nodes: frozenset[str]) -> None:
        if self._observer is not None:
            self._observer.stop()
        self._observer = ClusterObserver(nodes)

    def keep(self, step: int, parts: Sequence[Any], newest: int) -> list[Any]:
        """Store each rank's part of a snapshot on a rank of another node, without waiting, and drop
        snapshots older than ``newest``. Return references to the step, ready once the parts are
        stored; none if all ranks are on one node."""
        nodes = {rank: address.node for rank, address in self._addresses.items()}
        refs = []
        for rank, keeper in keepers(nodes).items():
            actor = self._actors[keeper]
            refs.append(actor.keep_snapshot.remote(rank, step, parts[rank : rank + 1], newest))
        return refs

    def shutdown(self) -> None:
        self._ended = self._ended or "they were shut down"
        if self._observer is not None:
            self._observer.stop()
            if not self._observer.gcs_answers():  # Ray's calls would hang and not end the ranks
                kill_from_outside(self._addresses, everywhere=False)
                return
        for actor in (*self._actors, *self._spares.actors):
            ray.kill(actor, no_restart=True)
        self._actors, self._spares = [], Spares()
        self.placement.remove()
