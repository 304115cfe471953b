"""Calls of ranks with failure detection: a rank that dies or hangs during a call is named."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from raymm.actors.faults.cluster_observer import BOTH_LOOKS_S, ClusterObserver
from raymm.actors.faults.diagnosis import Failure, blamed, death, first_line, keep, raised
from raymm.actors.faults.inquiry import (
    BEAT_S,
    Heartbeats,
    Inquiry,
    inquire,
    kill_from_outside,
    look_from_outside,
)
from raymm.actors.faults.stacks import Address, Look
from raymm.actors.optimizer.optimizer import Progress
from raymm.actors.placement.node_types import draining_nodes
from raymm.errors import ChannelError, Loss, RunFailedError

# Seconds between two checks of ranks and cluster while no results arrive.
LISTEN_S = 1.0
# Seconds for ranks to leave a step whose connections were shut down; an instruction in progress
# ends first. Ranks that do not leave in time are replaced.
LEAVE_S = 30.0


class ObservedRanks(ABC):
    """Actors of ranks, and their state.

    Args:
        patience: longest time that a rank may wait for another, in seconds.

    Attributes:
        keeps_survivors: True if the other ranks survive the loss of a rank, because its state is
            available elsewhere. They always survive an error that a stage raises.
    """

    keeps_survivors = False
    # True if ranks can reconnect after one of them has failed.
    renews = False
    _generation = 0  # generation of the connections
    _interrupted: Failure | None = None  # failure after which the ranks have not reconnected

    def __init__(self, labels: Sequence[str], patience: float) -> None:
        self._labels, self._patience = list(labels), patience
        self._places: list[str] = [""] * len(labels)
        self._addresses: dict[int, Address] = {}
        self._observer: ClusterObserver | None = None
        self._heartbeats = Heartbeats(patience)
        self._ended: str | None = None  # reason why the processes have ended
        self._actors: list[Any] = []

    @property
    @abstractmethod
    def nodes(self) -> frozenset[str]:
        """Return Ray ids of the nodes with ranks or with processes next to them."""

    @abstractmethod
    def shutdown(self) -> None:
        """End all ranks and release their resources."""

    @property
    def ended(self) -> str | None:
        """Return the reason why the processes have ended; None while they run."""
        return self._ended

    def check_running(self) -> None:
        """Check that calls are possible. Raise a ``RuntimeError`` if the processes have ended;
        names the reason. Raise a ``RunFailedError`` if a step failed, and the ranks have not
        reconnected since."""
        if self._ended is not None:
            raise RuntimeError(f"the processes have ended: {self._ended}; nothing can run any more")
        if self._interrupted is not None:
            raise self._interrupted.error(self._interrupted.message)

    @property
    def interrupted(self) -> Failure | None:
        """Return the failure after which the ranks have not reconnected; None if they run or have
        ended."""
        return None if self._ended is not None else self._interrupted

    def wait(
        self, refs: Sequence[ray.ObjectRef], ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Return the results of one call per rank. A dead rank is detected while others still wait
        for it. Raise a ``RankFailedError`` if a rank died or raised an error, or no result arrived
        in time, and a ``RunFailedError`` if a node with processes of the run or the cluster's
        control server is lost.

        Args:
            ranks: rank of each reference; all ranks in order if None.
            timeout: seconds without a result. None to wait until no rank has started an instruction
                for as long as a rank may wait for another (``timeout_s``).
        """
        ranks = list(range(len(refs))) if ranks is None else list(ranks)
        pending = dict(zip(refs, ranks, strict=True))
        results: dict[int, Any] = {}
        patience = self._patience if timeout is None else min(timeout, self._patience)
        due, late = time.monotonic() + patience, time.monotonic() + (timeout or 0.0)
        while pending:
            self.check_cluster()
            try:
                # Fetches all results in one call; returns early if one failed.
                values = ray.get([*pending], timeout=LISTEN_S)
                results.update(zip(pending.values(), values, strict=True))
                break
            except GetTimeoutError:
                ready, _ = ray.wait([*pending], num_returns=len(pending), timeout=0)
            except RayError:
                ready, _ = ray.wait([*pending], num_returns=1, timeout=LISTEN_S)
            if not ready:
                self._beat()
                if (now := time.monotonic()) >= due:
                    if timeout is None or now >= late or not self._all_answer():
                        patience = self._check_progress(pending, timeout)
                    due = time.monotonic() + patience
                continue
            due, late = time.monotonic() + patience, time.monotonic() + (timeout or 0.0)
            for ref in ready:
                rank = pending.pop(ref)
                results[rank] = self._fetch(rank, ref, pending)
        return [results[rank] for rank in ranks]

    def _fetch(self, rank: int, ref: ray.ObjectRef, pending: Mapping[Any, int]) -> Any:
        try:
            return ray.get(ref)
        except RayActorError as error:
            self._died(rank, error)
        except RayTaskError as error:
            self._raised(rank, error, pending)
        except RayError as error:  # the input was lost together with the data worker that held it
            self.look_at_nodes()
            message = f"{self._name(rank)} failed: {first_line(error)}"
            self._fail(Failure(message, lost=frozenset()), error)

    def check_cluster(self, error: RayActorError | None = None) -> None:
        """Raise an error if the cluster or a node of the run is lost. ``error`` is the death of a
        process that this loss may have caused. Raise a ``RunFailedError`` if a node with processes
        of the run or the cluster's control server is lost."""
        if self._observer is None or self._observer.lost is None:
            return
        lost_nodes = self._observer.lost_nodes
        ranks = [rank for rank, process in self._addresses.items() if process.node in lost_nodes]
        had = f". It hosted {', '.join(self._name(rank) for rank in ranks)}" if ranks else ""
        kind = lost_node_error(lost_nodes, error is not None and error.preempted)
        can_continue = kind.keywords["lost"] is not Loss.CLUSTER  # other nodes can continue the run
        lost = frozenset(ranks) if can_continue else None
        self._fail(Failure(f"{self._observer.lost}{had}", kind, lost), error)

    def look_at_nodes(self) -> None:
        """Check all nodes with processes of the run at once, after one of these processes has died.

        Raises:
            RunFailedError: see :meth:`check_cluster`.
        """
        if self._observer is not None:
            self._observer.look_at_nodes()
            self.check_cluster()

    def _all_answer(self) -> bool:
        """Return True if all ranks that have started answer."""
        inquiry = inquire(dict(enumerate(self._actors)))
        return not inquiry.dead and not set(inquiry.silent) & set(self._addresses)

    def look_after(self) -> None:
        """Check that ranks are alive and none takes too long, while no caller waits for their
        calls.

        Raises:
            RankFailedError: a rank is dead or takes too long.
            RunFailedError: see :meth:`check_cluster`.
        """
        self.check_running()
        self.check_cluster()
        self._beat()

    def give_up(self, rank: int, why: str) -> NoReturn:
        """Report a rank as failed that still runs but misbehaves, so that another process replaces
        it. ``why`` is the text that follows the rank's name in the message.

        Raises:
            RankFailedError: always.
        """
        self._fail(Failure(f"{self._name(rank)} {why}", lost=frozenset({rank})), None)

    def _beat(self) -> None:
        """Raise an error if a rank is dead or takes too long."""
        if not (reachable := {rank: self._actors[rank] for rank in self._addresses}):
            return
        inquiry = inquire(reachable, BEAT_S)
        if inquiry.dead:
            self._died(*min(inquiry.dead.items()))
        late = self._heartbeats.overdue(inquiry, time.monotonic(), self._look)
        if late is not None:
            self._heartbeats.forget(late.number)
            reason = f"{self._name(late.number)} takes too long: {late.why}"
            names, addresses = self._names, self._addresses
            self._fail(blamed(inquiry, reason, names, addresses, [late.number]), None)

    def _look(self, ranks: Collection[int]) -> Mapping[int, Look]:
        return look_from_outside({rank: self._addresses[rank] for rank in ranks})

    def _check_progress(self, pending: Mapping[Any, int], timeout: float | None) -> float:
        """Return the seconds to wait before the next check; raise an error if no rank makes
        progress."""
        inquiry = inquire(dict(enumerate(self._actors)))
        if timeout is None and not inquiry.dead and inquiry.still() < self._patience:
            return self._patience - inquiry.still()
        waiting = ", ".join(self._name(rank) for rank in pending.values())
        reason = f"no answer within {timeout:g} s from {waiting}" if timeout is not None else (
            f"no rank has started a new instruction for {self._patience:g} s (timeout_s); raise "
            "timeout_s if an instruction may take longer"
        )
        self._blame(inquiry, reason)

    def _died(self, rank: int, error: RayActorError) -> NoReturn:
        self._look_at_node_of(rank, error, 0.0)
        if self._aborted([rank]):  # possibly caused by another rank, which is then named instead
            asked = inquire(dict(enumerate(self._actors)))
            inquiry = replace(asked, dead={**asked.dead, rank: error})
            culprits = self._culprits(inquiry)
            if culprits[0] not in inquiry.dead:
                reason = f"{self._name(rank)} died: it aborted (SIGABRT)"
                names, addresses = self._names, self._addresses
                self._fail(blamed(inquiry, reason, names, addresses, culprits), error)
            rank, error = culprits[0], inquiry.dead[culprits[0]]
        failure = death(rank, error, self._names, self._addresses)
        self._look_at_node_of(rank, error, BOTH_LOOKS_S)  # the node may end after its processes
        self._fail(failure, error)

    def _look_at_node_of(self, rank: int, error: RayActorError, pause: float) -> None:
        if self._observer is not None and rank in self._addresses:
            self._observer.look_at_node(self._addresses[rank].node, (pause,))
            self.check_cluster(error)

    def _raised(self, rank: int, error: RayTaskError, pending: Mapping[Any, int]) -> NoReturn:
        if isinstance(error.cause, ChannelError):
            self.look_at_nodes()  # an inquiry would wait for the processes of a lost node
            inquiry = inquire(dict(enumerate(self._actors)))
            rank, error = self._own_failure(pending) or (rank, error)
        if isinstance(error.cause, ChannelError):
            reason = f"{type(error.cause).__name__}: {error.cause}"
            self._blame(inquiry, f"{self._name(rank)} failed: {reason}", error)
        self._fail(raised(rank, error, self._names), error)

    def _own_failure(self, pending: Mapping[Any, int]) -> tuple[int, RayTaskError] | None:
        """Return a rank whose own code raised an error, as opposed to a lost connection."""
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
        culprits = self._culprits(inquiry)
        self._fail(blamed(inquiry, reason, self._names, self._addresses, culprits), error)

    def _culprits(self, inquiry: Inquiry) -> list[int]:
        return inquiry.culprits(self._patience / 2, self._aborted(inquiry.dead))

    def _aborted(self, dead: Collection[int]) -> list[int]:
        addresses = {rank: self._addresses[rank] for rank in dead if rank in self._addresses}
        looks = look_from_outside(addresses) if addresses else {}
        return [rank for rank, look in looks.items() if look.aborted]

    def _fail(self, failure: Failure, error: BaseException | None) -> NoReturn:
        """Raise the failure. End the processes, unless the lost ranks can be replaced."""
        message = failure.message
        if failure.texts:
            location = keep({"error.txt": message, **failure.texts})
            message += f"\ntracebacks and stacks: {location}"
        if self._can_renew(failure):
            self._interrupt(failure)
        else:
            self._ended = failure.message.partition("\n")[0]
            self.shutdown()
        raise failure.error(message) from error

    def _can_renew(self, failure: Failure) -> bool:
        renews = failure.own or (self.keeps_survivors and failure.lost is not None)
        return renews and self.renews

    def _interrupt(self, failure: Failure) -> None:
        earlier_lost = frozenset() if self._interrupted is None else self._interrupted.lost
        lost = (failure.lost or frozenset()) | (earlier_lost or frozenset())
        self._interrupted = replace(failure, lost=lost)
        survivors = [actor for rank, actor in enumerate(self._actors) if rank not in lost]
        cut(survivors, self._generation)

    @property
    def _names(self) -> list[str]:
        return list(map(self._name, range(len(self._labels))))

    def _name(self, rank: int) -> str:
        return f"rank {rank} (stages {self._labels[rank]}{self._places[rank]})"


def lost_node_error(nodes: frozenset[str], preempted: bool) -> partial[RunFailedError]:
    """Return a factory of the error for losing nodes, given its text. Without nodes, or if the
    driver's own node is lost, the error is the loss of the cluster. ``preempted`` is True if Ray
    reported a preemption of a process there."""
    if not nodes or ray.get_runtime_context().get_node_id() in nodes:
        return partial(RunFailedError, lost=Loss.CLUSTER)
    announced = preempted or bool(nodes & draining_nodes().keys())
    loss = Loss.PREEMPTED_NODE if announced else Loss.NODE
    return partial(RunFailedError, lost=loss, nodes=nodes)


def cut(actors: Collection[Any], generation: int) -> None:
    """Shut down connections, so that ranks which wait for others fail at once. Does not wait."""
    for actor in actors:
        actor.cut.remote(generation)


def leave(
    actors: Mapping[int, Any], generation: int, timeout: float = LEAVE_S
) -> dict[int, Progress]:
    """Make ranks leave the step in progress; return the progress of those that did within
    ``timeout`` s."""
    cut(list(actors.values()), generation)
    refs = {rank: actor.leave.remote() for rank, actor in actors.items()}
    if refs:
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout)
    progress: dict[int, Progress] = {}
    for rank, ref in refs.items():
        try:
            progress[rank] = ray.get(ref, timeout=0)
        except RayError:  # dead, or too late
            continue
    return progress


def end(actors: Mapping[int, Any], addresses: Mapping[int, Address]) -> None:
    kill_from_outside({rank: addresses[rank] for rank in actors if rank in addresses})
    for actor in actors.values():
        ray.kill(actor, no_restart=True)
