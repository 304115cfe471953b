"""Space of stage searches: a balanced partition per module and number of stages, the plans made
from them, and lower bounds of their seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from raymm.errors import NoPlanError, PlanError
from raymm.plural import plural
from raymm.scheduler.costs.layer_costs import CostProfile, LayerWork, has_backward, layer_work
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.schedules.registry import DEFAULT_SCHEDULE, find_schedule
from raymm.scheduler.search.module_degrees import (
    ALONE,
    ModuleDegrees,
    SharedModules,
    common_replicas,
    make_plan,
    process_profile,
    recomputing,
    with_degrees,
)
from raymm.scheduler.search.partition import (
    Ranges,
    cost_matrix,
    least_bottlenecks,
    partition_matrix,
)
from raymm.scheduler.search.stage_memory import StageMemory

Counts = dict[str, int]
"""Stages per module."""

# Bounds and simulated times are sums of the same numbers in different orders, so bounds are lowered
# by this fraction.
ROUNDING = 1e-9


@dataclass(frozen=True)
class StageSpace:
    """Everything that the searches choose from.

    Attributes:
        ranks: number of devices, one per process; a plan may use fewer.
        num_microbatches, schedule, recompute, recompute_loss, memory_limit: as in
            :func:`make_plan`.
        max_stages: most stages of a module; None for no limit.
        cut_costs: per module, seconds that a cut before each layer costs the two adjacent stages,
            as in :func:`~raymm.scheduler.search.partition.cost_matrix`.
        memory: model of the stages that fit in memory and the time added to make them fit; None if
            all fit.
        expected: work that partitions balance instead of the profile's, for comparison with
            planners that know less (``benchmarks.baselines.pipelines.unaware_work``).
        degrees: degrees of modules; by default every stage is one process.
        by_part: True to evaluate only one of the equal parts of a plan, which replicas of all
            modules make (:class:`~raymm.scheduler.plan.equal_part.EqualPart`).
        any_schedule: True if lower bounds must hold for every schedule of a plan, not only for
            ``schedule``.

    Raises:
        NoPlanError: fewer ranks than one stage of each module needs.
        PlanError: the profile, or ``expected``, does not match the graph.
    """

    graph: ModuleGraph
    profile: CostProfile
    ranks: int
    num_microbatches: int
    schedule: str = DEFAULT_SCHEDULE
    recompute: bool = False
    recompute_loss: bool = False
    memory_limit: int | None = None
    max_stages: int | None = None
    cut_costs: Mapping[str, Sequence[float]] | None = None
    memory: StageMemory | None = None
    expected: Mapping[str, tuple[LayerWork, ...]] | None = None
    degrees: SharedModules = field(default_factory=dict)
    by_part: bool = False
    any_schedule: bool = False
    _partitions: dict[tuple[str, int, int], Ranges | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        needed = sum(self.shared(node.name).devices for node in self.graph.nodes)
        if self.ranks < needed:
            what = "at least one each" if needed == len(self.graph.nodes) else f"{needed}"
            raise NoPlanError(
                f"ranks is {self.ranks}; {len(self.graph.nodes)} modules need {what}"
            )
        if self.max_stages is not None and self.max_stages < 1:
            raise NoPlanError(f"max_stages is {self.max_stages}; it must be at least 1")
        self.profile.check(self.graph)
        if self.expected is not None:
            for node in self.graph.nodes:
                if len(self.expected.get(node.name, ())) != node.num_layers:
                    raise PlanError(
                        f"expected has {len(self.expected.get(node.name, ()))} layers of "
                        f"{node.name!r}; the module has {node.num_layers}"
                    )

    @cached_property
    def _tables(self) -> dict[str, _ModuleTable]:
        return _tables(self)

    def shared(self, module: str) -> ModuleDegrees:
        """Return the degrees of a module."""
        return self.degrees.get(module, ALONE)

    @cached_property
    def process_profile(self) -> CostProfile:
        """Costs of layers per process."""
        return process_profile(self.graph, self.profile, self.degrees)

    def replica_microbatches(self, module: str) -> int:
        """Return the microbatches per step of one replica of a module."""
        return self.num_microbatches // self.shared(module).dp

    def most_stages(self, module: str) -> int:
        """Return the most stages of a module if every other module has one."""
        others = sum(self.shared(n.name).devices for n in self.graph.nodes if n.name != module)
        room = (self.ranks - others) // self.shared(module).devices
        limits = [self.graph.node(module).num_layers, room]
        return min(limits if self.max_stages is None else [*limits, self.max_stages])

    def beyond(self, module: str, counts: Mapping[str, int]) -> int:
        """Return the stages on the longest path from a module's output to the loss. ``counts`` must
        have every later module."""
        return max(
            (counts[c] + self.beyond(c, counts) for c in self.graph.consumers(module)), default=0
        )

    def partition(self, module: str, stages: int, beyond: int = 0) -> Ranges | None:
        """Return the balanced partition, or None if none is feasible. With :attr:`memory`,
        ``beyond`` matters (see :meth:`beyond`): stage i has the depth ``stages - i + beyond``, and
        1F1B holds activations of as many microbatches there."""
        key = (module, stages, beyond if self.memory else 0)
        if key not in self._partitions:
            try:
                self._partitions[key] = self._balanced(module, stages, beyond)
            except NoPlanError:
                self._partitions[key] = None
        return self._partitions[key]

    def _balanced(self, module: str, stages: int, beyond: int) -> Ranges:
        matrix = self._tables[module].balanced
        if self.memory is None:
            return partition_matrix(matrix, stages)
        while True:  # entries become exact where they matter, so this ends with the optimum
            added = self.memory.added(module, stages, beyond)
            ranges = partition_matrix(matrix + added, stages)
            if not self.memory.refine(module, ranges, beyond):
                return ranges

    def possible(self, module: str, beyond: int = 0, most: int | None = None) -> list[int]:
        """Return the numbers of stages that a module can have, ascending, up to ``most`` or the
        number of layers or ranks. ``beyond`` is as in :meth:`partition`."""
        limit = self.most_stages(module)
        limit = limit if most is None else min(limit, most)
        return [n for n in range(1, limit + 1) if self.partition(module, n, beyond) is not None]

    def bottleneck(self, module: str, stages: int, beyond: int = 0) -> float:
        """Return the seconds of 1F + 1B of the slowest stage, as in partitions; ``inf`` if no
        partition is feasible. ``beyond`` is as in :meth:`partition`."""
        return self._worst("balanced", module, stages, beyond)

    def lower_bound(self, module: str, stages: int, beyond: int = 0) -> float:
        """Return a lower bound of the seconds of an iteration with this partition of the module;
        ``inf`` if no partition is feasible. A stage cannot start before a microbatch has reached
        it. Then it does all its work, and its last backward has to travel to the first stages
        (without backward, its last forward to the loss and from there back). These paths do not
        depend on partitions, so the largest bound over modules is a bound of the whole plan."""
        return self._worst("bound", module, stages, beyond) * (1 - ROUNDING)

    def least_bound(self, module: str, stages: int) -> float:
        """Return the least :meth:`lower_bound` over all partitions into ``stages`` stages, ignoring
        memory."""
        return float(self._tables[module].least[stages - 1]) * (1 - ROUNDING)

    def _worst(self, table: str, module: str, stages: int, beyond: int) -> float:
        ranges = self.partition(module, stages, beyond)
        if ranges is None:
            return math.inf
        values = getattr(self._tables[module], table)
        return float(max(values[lo, hi] for lo, hi in ranges))

    def combinations(self) -> Iterator[Counts]:
        """Yield the stage counts within the budget, including those that memory forbids."""
        modules = self.graph.topological[::-1]  # start with modules that determine depth

        def extend(chosen: Counts, left: int, at: int) -> Iterator[Counts]:
            if at == len(modules):
                yield {m: chosen[m] for m in self.graph.topological}
                return
            module = modules[at]
            width = self.shared(module).devices
            rest = sum(self.shared(other).devices for other in modules[at + 1 :])
            most = (left - rest) // width
            for count in range(1, min(self.most_stages(module), most) + 1):
                yield from extend({**chosen, module: count}, left - count * width, at + 1)

        yield from extend({}, self.ranks, 0)

    def plan(self, counts: Mapping[str, int]) -> Plan:
        """Return the plan for these stage counts; raise ``NoPlanError`` if a module cannot have so
        many stages."""
        partitions = {}
        for node in self.graph.nodes:
            count = counts[node.name]
            ranges = None
            if 1 <= count <= node.num_layers:
                ranges = self.partition(node.name, count, self.beyond(node.name, counts))
            if ranges is None:
                raise NoPlanError(f"module {node.name!r} cannot have {plural(count, 'stage')}")
            partitions[node.name] = ranges
        plan = self.made_of(partitions)
        if self.memory is None:
            return plan
        options = {
            name: self.memory.options(name, ranges, self.beyond(name, counts))
            for name, ranges in partitions.items()
        }
        stages = tuple(
            replace(s, layer_options=options[s.module][s.index][: self._blocks(s)])
            for s in plan.stages
        )
        return replace(plan, stages=stages)

    def _blocks(self, stage: Stage) -> int:
        lo, hi = stage.layers
        return max(0, min(hi, self.graph.node(stage.module).num_blocks) - lo)

    def made_of(self, partitions: Mapping[str, Ranges]) -> Plan:
        """Return the plan with these layers per stage, one rank per stage (and replica)."""
        plan = make_plan(
            self.graph, partitions, self.num_microbatches // self.parts, self.schedule,
            self.profile, self.recompute, self.memory_limit, self.recompute_loss,
        )
        return with_degrees(plan, self.degrees, self.parts)

    @property
    def parts(self) -> int:
        """Number of equal parts of plans; only one part is evaluated."""
        return common_replicas(self.graph, self.degrees) if self.by_part else 1

    def stage_seconds(self, module: str) -> np.ndarray:
        """Return the seconds of 1F + 1B of layers [lo, hi) as one stage, as balanced by partitions,
        in an (n + 1, n + 1) array."""
        return self._tables[module].balanced

    @cached_property
    def backward(self) -> dict[str, tuple[bool, ...]]:
        """Per module and layer, True if a training step runs a backward of it."""
        return has_backward(self.graph)

    @cached_property
    def recomputing(self) -> dict[str, np.ndarray]:
        """Stages that recompute, as in :func:`recomputing`."""
        return recomputing(self.graph, self.recompute, self.recompute_loss)


@dataclass(frozen=True)
class _ModuleTable:
    """Seconds per possible stage of a module, in (n + 1, n + 1) arrays over (lo, hi): the work that
    partitions balance, and the stage's lower bound of an iteration."""

    balanced: np.ndarray
    bound: np.ndarray

    @cached_property
    def least(self) -> np.ndarray:
        """(n,) least bound over all partitions, by the number of stages minus one."""
        return least_bottlenecks(self.bound)


def _tables(space: StageSpace) -> dict[str, _ModuleTable]:
    works = layer_work(space.graph, space.process_profile)
    # A split B_w can be postponed, so only B_d is certain to delay other stages.
    split = space.any_schedule or find_schedule(space.schedule).splits_backward
    forward = {m: np.array([w.forward for w in work]) for m, work in works.items()}
    gradient = {
        m: np.array([w.backward_input if split else w.backward for w in work])
        for m, work in works.items()
    }
    ways = LongestWays(space.graph, forward, gradient)
    tables = {}
    for module, work in works.items():
        # Gradient sums are ignored, both in bounds and in the balanced work.
        all_work = cost_matrix([w.total for w in work])
        in_time = cost_matrix(forward[module] + gradient[module])  # before the last gradient
        again = np.where(space.recomputing[module], cost_matrix(forward[module]), 0.0)
        all_work, in_time = all_work + again, in_time + again
        # A stage has a backward if its last layer has one.
        last_has_backward = np.array([False, *space.backward[module]])[None, :]
        after = np.where(
            last_has_backward, ways.to_first(module)[:, None], ways.to_loss_and_back(module)
        )
        steps = space.replica_microbatches(module)
        bound = ways.from_data(module)[:, None] + np.maximum(
            steps * all_work, steps * in_time + after
        )
        balanced = all_work
        if space.expected is not None:
            balanced = cost_matrix([w.total for w in space.expected[module]])
        if space.cut_costs and module in space.cut_costs:
            balanced = balanced + cost_matrix([0.0] * len(work), space.cut_costs[module])
        tables[module] = _ModuleTable(balanced, bound)
    return tables


class LongestWays:
    """Seconds of the longest path of one microbatch to or from each cut (n + 1 of them) of a
    module, from (n,) forward seconds of every layer and (n,) seconds in which a gradient passes, by
    module."""

    def __init__(
        self,
        graph: ModuleGraph,
        forward: Mapping[str, np.ndarray],
        gradient: Mapping[str, np.ndarray],
    ) -> None:
        self.forward = {m: np.array([0.0, *np.cumsum(f)]) for m, f in forward.items()}
        self.gradient = {m: np.array([0.0, *np.cumsum(g)]) for m, g in gradient.items()}
        self.before: dict[str, float] = {}  # from the data to the module's input
        self.back: dict[str, float] = {}  # a gradient from there to the first layers
        # From the module's output to a loss, and the loss's gradient to the first layers.
        self.beyond: dict[str, float] = {}
        for m in graph.topological:
            feeding = graph.producers(m)
            self.before[m] = max((self.before[p] + self.forward[p][-1] for p in feeding), default=0)
            self.back[m] = max((self.back[p] + self.gradient[p][-1] for p in feeding), default=0)
        for m in reversed(graph.topological):
            ways = [self.beyond[c] + self.forward[c][-1] for c in graph.consumers(m)]
            self.beyond[m] = max(ways, default=self.gradient[m][-1] + self.back[m])

    def from_data(self, module: str) -> np.ndarray:
        """Return the forward seconds from the data to each cut."""
        return self.before[module] + self.forward[module]

    def to_first(self, module: str) -> np.ndarray:
        """Return the seconds of a gradient from each cut to the first layers."""
        return self.back[module] + self.gradient[module]

    def to_loss_and_back(self, module: str) -> np.ndarray:
        """Return the seconds from each cut to a loss, and of its gradient to the first layers."""
        forward = self.forward[module]
        return forward[-1] - forward + self.beyond[module]
