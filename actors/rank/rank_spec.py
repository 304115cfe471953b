"""Specification of a rank's process, sent to its actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from raymm.actors.features.feature_folder import FeatureFolder
from raymm.actors.optimizer.gradient_reduction import ParameterOwnership, ReductionGroup
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.quota import Backend
from raymm.actors.rank.rendezvous import EVERYONE, peers
from raymm.actors.sharding.parameter_shards import ShardSpec
from raymm.scheduler.plan.port_routes import EdgePorts
from raymm.scheduler.plan.process_grid import P2PGroup, connected_pairs
from raymm.scheduler.plan.rendezvous_order import rendezvous_order
from raymm.scheduler.plan.stage import Edge, StageId

if TYPE_CHECKING:
    from raymm.actors.stages.encoder import EncoderStage
    from raymm.actors.stages.language import LanguageStage


MESSAGE_CTAS = 32
"""Multiprocessors that all messages in flight may occupy. Receives posted early hold theirs too."""
LINK_CTAS = 8
"""Largest number of multiprocessors that one message may occupy."""


class RendezvousRound(NamedTuple):
    """Processes that create a process group together.

    Attributes:
        number: position in the order in which every process creates its groups, from 1.
        members: process numbers; for a link, (sender, receiver).
        is_link: True if the group carries messages from the first member to the second.
        sums: parameters whose gradients the group sums; None if it connects processes of one rank.
    """

    number: int
    members: tuple[int, ...]
    is_link: bool = False
    sums: ReductionGroup | None = None


@dataclass(frozen=True)
class ConnectionPlan:
    """Groups and channels that one process connects.

    Attributes:
        p2p_groups: (directed edge, number of the edge on all processes, senders and receivers).
        link_ctas: multiprocessors of a GPU that one message may occupy.
    """

    rounds: tuple[RendezvousRound, ...] = ()
    p2p_groups: tuple[tuple[Edge, int, P2PGroup], ...] = ()
    link_ctas: int = LINK_CTAS


def connection_plans(
    processes: int,
    p2p_groups: Sequence[tuple[Edge, Sequence[P2PGroup]]],
    groups: Sequence[tuple[int, ...]] = (),
    reductions: Sequence[ReductionGroup] = (),
) -> tuple[ConnectionPlan, ...]:
    """Return the connection plan of every process.

    Edges with messages from one process to the same other process share a link. Each ordered pair
    of processes has its own link, so a send or a receive never waits for a receive from another
    process.
    """
    pairs = connected_pairs(p2p_groups)
    unnumbered = [
        *(RendezvousRound(0, members) for members in groups),
        *(RendezvousRound(0, pair, is_link=True) for pair in pairs),
        *(RendezvousRound(0, reduction.processes, sums=reduction) for reduction in reductions),
    ]
    rounds: list[list[RendezvousRound]] = [[] for _ in range(processes)]
    order = rendezvous_order([meeting.members for meeting in unnumbered])
    for number, index in enumerate(order, start=1):
        meeting = unnumbered[index]._replace(number=number)
        for process in meeting.members:
            rounds[process].append(meeting)
    channels: list[list[tuple[Edge, int, P2PGroup]]] = [[] for _ in range(processes)]
    for number, (edge, edge_groups) in enumerate(p2p_groups):
        for p2p_group in edge_groups:
            for process in {*p2p_group.senders, *p2p_group.receivers}:
                channels[process].append((edge, number, p2p_group))
    ctas = link_ctas(pairs)
    return tuple(
        ConnectionPlan(tuple(process_rounds), tuple(process_channels), ctas)
        for process_rounds, process_channels in zip(rounds, channels, strict=True)
    )


def link_ctas(pairs: Sequence[tuple[int, int]] | dict[tuple[int, int], None]) -> int:
    """Return the multiprocessors of a GPU that one message may occupy: the same for all links, and
    few enough that computation keeps the rest when all links of a process are busy."""
    links: dict[int, int] = {}
    for pair in pairs:
        for process in pair:
            links[process] = links.get(process, 0) + 1
    return max(1, min(LINK_CTAS, MESSAGE_CTAS // max(links.values(), default=1)))


class ProcessGroups(NamedTuple):
    """Processes of one rank, by what they share with a given process.

    ``rank`` has all of them, ``data`` those that work on the same microbatch, ``samples`` those
    that split its samples, ``tokens`` those that split its samples' tokens, and ``tensors`` those
    that split each token's computation. A group is empty if the process is its only member.
    """

    rank: tuple[int, ...] = ()
    data: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    tensors: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankSpec:
    """Specification of one process.

    Attributes:
        builders: per stage, a picklable function that builds the stage module.
        shard_specs: per module, the shard of each parameter that a process holds.
        autocast: name of the torch dtype for automatic mixed precision, or None.
        exact_autocast: True to leave fully sharded parameters to autocast, instead of gathering
            them in its dtype.
        reloadable: modules whose frozen weights can be loaded again; under autocast they are kept
            in its dtype only.
        kernels: attention kernels, see :mod:`raymm.kernels.choice.choice`.
        device: ``"cpu"`` or ``"cuda"``.
        threads: intra-op threads.
        quotas: for each set of modules that run concurrently, shares of the device's
            multiprocessors.
        quota_backend: makes the quotas' streams; by default
            :func:`raymm.actors.executor.colocation.default_backend`.
        timeout_s: longest wait for another rank, in seconds.
        nccl_timeout_s: seconds after which NCCL's watchdog ends a process; None for twice
            ``timeout_s``.
        every: pairs (producer, consumer) of modules where the consumer reads all samples.
        ports: ports that messages carry, for edges that carry or withhold any.
        spans: groups of microbatches that share a forward
            (:func:`raymm.scheduler.plan.microbatch_groups.group_spans`).
        features: folder for the features of each stage that stores them.
        seed: seed of the run, for stochastic rounding.
    """

    rank: int
    world_size: int
    builders: dict[StageId, Callable[[], EncoderStage | LanguageStage]]
    edges: tuple[Edge, ...]
    connections: ConnectionPlan = field(default_factory=ConnectionPlan)
    process_groups: ProcessGroups = field(default_factory=ProcessGroups)
    shard_specs: dict[str, ShardSpec] = field(default_factory=dict)
    parameter_ownership: ParameterOwnership = field(default_factory=ParameterOwnership)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    autocast: str | None = None
    exact_autocast: bool = False
    reloadable: frozenset[str] = frozenset()
    kernels: str = "raymm"
    device: str = "cpu"
    threads: int = 1
    quotas: tuple[dict[str, float], ...] = ()
    quota_backend: Callable[[], Backend] | None = None
    timeout_s: float = 300.0
    nccl_timeout_s: float | None = None
    every: tuple[tuple[str, str], ...] = ()
    spans: dict[StageId, int] = field(default_factory=dict)
    ports: dict[Edge, EdgePorts] = field(default_factory=dict)
    features: dict[StageId, FeatureFolder] = field(default_factory=dict)
    seed: int = 0

    @property
    def members(self) -> dict[int, Sequence[int]]:
        """Return the members of the process's groups, and of the group of all processes, by group
        number."""
        group_members = {meeting.number: meeting.members for meeting in self.connections.rounds}
        return {EVERYONE: range(self.world_size), **group_members}

    @property
    def modules(self) -> set[str]:
        return {stage.module for stage in self.builders}

    def unbuilt(self) -> RankSpec:
        return replace(self, builders={})

    @property
    def peers(self) -> set[int]:
        """Return the processes whose actors this process calls to create its groups."""
        return peers(self.rank, self.members.values())


class ProcessSpec(Protocol):
    """Part of a spec that the group of actors reads."""

    @property
    def timeout_s(self) -> float: ...
    @property
    def peers(self) -> set[int]: ...
    @property
    def modules(self) -> set[str]: ...
    def unbuilt(self) -> ProcessSpec:
        """Return a copy without stages."""
        ...


class RankPlace(NamedTuple):
    """Location of a rank; ``label`` names its stages."""

    label: str
    host: str
    pid: int
