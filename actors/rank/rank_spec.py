"""Everything that the process of a rank must know to build itself, as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from raymm.actors.features.feature_folder import FeatureFolder
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.optimizer.ownership import ParameterOwnership
from raymm.actors.quota import Backend
from raymm.actors.rank.connection_plan import ConnectionPlan
from raymm.actors.rank.meeting_store import EVERYONE, peers
from raymm.actors.sharding.parameter_shards import ShardSpec
from raymm.scheduler.plan.port_routes import EdgePorts
from raymm.scheduler.plan.stage import Edge, StageId

if TYPE_CHECKING:
    from raymm.actors.stages.encoder import EncoderStage
    from raymm.actors.stages.language import LanguageStage


class ProcessGroups(NamedTuple):
    """Processes of one rank: all of them; those that share a microbatch with one, its samples,
    its samples' tokens; and those that share every token's work. None where it is the only one."""

    rank: tuple[int, ...] = ()
    data: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    tensors: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankSpec:
    """Everything a process must know to build itself.

    Attributes:
        rank, world_size: its number, and how many processes there are.
        builders: per stage name, a picklable function that builds the stage module.
        edges: data edges from and to its stages (stage names).
        connections: what it connects with other processes.
        process_groups: the processes of its own rank, by what they share.
        shard_specs: per module, which shard of each parameter a process holds.
        parameter_ownership: what it is to do with parameters that others have too.
        optimizer: the optimizer's configuration.
        autocast: name of the torch dtype for automatic mixed precision, or None.
        exact_autocast: leave fully sharded parameters to autocast, instead of gathering them in
            its dtype.
        reloadable: modules whose frozen weights can be had again from where they came from;
            under autocast they are kept in its dtype only.
        kernels: that compute attention, see :mod:`raymm.kernels.choice.choice`.
        device: ``"cpu"`` or ``"cuda"``.
        threads: intra-op threads of this process.
        quotas: by module, shares of the device's multiprocessors, of every set of modules that
            run concurrently.
        quota_backend: makes the quotas' streams; by default
            :func:`raymm.actors.executor.colocation.default_backend`.
        timeout_s: seconds any wait on another rank may take.
        nccl_timeout_s: seconds after which NCCL's watchdog ends a process; None: twice as many.
        every: (producer, consumer) modules of which the second reads all samples.
        ports: what messages have of them, of edges that carry or withhold any.
        features: by stage whose features the process writes, where to.
        seed: of the run, for rounding at random.
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
    ports: dict[Edge, EdgePorts] = field(default_factory=dict)
    features: dict[StageId, FeatureFolder] = field(default_factory=dict)
    seed: int = 0

    @property
    def members(self) -> dict[int, Sequence[int]]:
        """Of all groups that it makes, by number; of the group of all processes, too."""
        own = {meeting.number: meeting.members for meeting in self.connections.meetings}
        return {EVERYONE: range(self.world_size), **own}

    @property
    def modules(self) -> set[str]:
        """Whose stages it has."""
        return {stage.module for stage in self.builders}

    def unbuilt(self) -> RankSpec:
        """The same without its stages."""
        return replace(self, builders={})

    @property
    def peers(self) -> set[int]:
        """Processes whose actors it must know to make them."""
        return peers(self.rank, self.members.values())


class ProcessSpec(Protocol):
    """What the group itself reads of its processes' specs."""

    @property
    def timeout_s(self) -> float: ...
    @property
    def peers(self) -> set[int]: ...
    @property
    def modules(self) -> set[str]: ...
    def unbuilt(self) -> ProcessSpec:
        """The same without its stages."""
        ...


class RankPlace(NamedTuple):
    """Where a rank runs.

    Attributes:
        label: what runs there.
        host: name of its node.
        pid: of its process.
    """

    label: str
    host: str
    pid: int
