"""What stage searches choose from: a balanced partition per module and number of stages, the
plans made of them, and seconds that such plans cannot undercut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from raymm.errors import NoPlanError, PlanError
from raymm.scheduler.costs.layer_costs import CostProfile, LayerWork, has_backward, layer_work
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.search.longest_ways import LongestWays
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

# Schedules that run a backward in one piece, so that its gradient is sent only when all of
# it is done.
WHOLE_BACKWARD = ("1f1b", "gpipe")

# Bounds and simulated times are sums of the same numbers in another order; bounds are taken
# as this share less than they come out.
ROUNDING = 1e-9


@dataclass(frozen=True)
class StageSpace:
    """Everything the searches choose from.

    Attributes:
        graph, profile: the model and what its layers cost.
        ranks: the budget of devices, one per process; a plan may use fewer.
        num_microbatches, schedule, recompute, recompute_loss, memory_limit: as of
            :func:`make_plan`.
        max_stages: the most stages a module may have, if limited.
        cut_costs: per module, seconds that the cut before each layer costs the two stages at
            it, as of :func:`~raymm.scheduler.search.partition.cost_matrix`.
        memory: which stage may hold which layers, and what making them fit adds; all fit if
            None.
        expected: what partitions balance instead of the profile's work, for comparison with
            planners that know less (``benchmarks.baselines.pipelines.unaware_work``).
        degrees: how modules are shared; by default every stage is one process.
        by_part: whether plans that consist of equal parts, as replicas of all modules make them,
            are looked at as one of them (:class:`~raymm.scheduler.plan.equal_part.EqualPart`).
        any_schedule: True if lower bounds have to hold for every schedule of a plan, False if only
            for ``schedule``.

    Raises:
        NoPlanError: if there are fewer ranks than modules need for one stage each.
        PlanError: if the profile, or ``expected``, is not of this graph.
    """

    graph: ModuleGraph
    profile: CostProfile
    ranks: int
    num_microbatches: int
    schedule: str = "1f1b"
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
        """How a module is shared."""
        return self.degrees.get(module, ALONE)

    @cached_property
    def process_profile(self) -> CostProfile:
        """What layers cost one process."""
        return process_profile(self.graph, self.profile, self.degrees)

    def replica_microbatches(self, module: str) -> int:
        """Microbatches of a step that one replica of a module has."""
        return self.num_microbatches // self.shared(module).dp

    def most_stages(self, module: str) -> int:
        """The most stages a module may have when every other module has one."""
        others = sum(self.shared(n.name).devices for n in self.graph.nodes if n.name != module)
        room = (self.ranks - others) // self.shared(module).devices
        limits = [self.graph.node(module).num_layers, room]
        return min(limits if self.max_stages is None else [*limits, self.max_stages])

    def beyond(self, module: str, counts: Mapping[str, int]) -> int:
        """Stages on the longest path from a module's output to the loss. ``counts`` must
        have every module after it."""
        return max(
            (counts[c] + self.beyond(c, counts) for c in self.graph.consumers(module)), default=0
        )

    def partition(self, module: str, stages: int, beyond: int = 0) -> Ranges | None:
        """The balanced partition, or None if none is feasible.

        Args:
            module: the module.
            stages: how many it is cut into.
            beyond: stages on the longest path from the module's output to the loss, which with
                :attr:`memory` matters: stage i has the depth ``stages - i + beyond``, and 1F1B
                holds activations of as many microbatches there.
        """
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
        while True:  # bounds become exact where they matter, so this ends with the best
            added = self.memory.added(module, stages, beyond)
            ranges = partition_matrix(matrix + added, stages)
            if not self.memory.refine(module, ranges, beyond):
                return ranges

    def possible(self, module: str, beyond: int = 0, most: int | None = None) -> list[int]:
        """How many stages a module can have, ascending.

        Args:
            module: by name.
            beyond: stages on the longest path from its output to the loss.
            most: stages that are asked for at most; None for as many as it has layers or ranks.
        """
        limit = self.most_stages(module)
        limit = limit if most is None else min(limit, most)
        return [n for n in range(1, limit + 1) if self.partition(module, n, beyond) is not None]

    def bottleneck(self, module: str, stages: int, beyond: int = 0) -> float:
        """Seconds of 1F + 1B of the slowest stage, as partitions count it; ``inf`` if no
        partition is feasible.

        Args:
            module: by name.
            stages: how many it is cut into.
            beyond: stages on the longest path from its output to the loss.
        """
        return self._worst("balanced", module, stages, beyond)

    def lower_bound(self, module: str, stages: int, beyond: int = 0) -> float:
        """Seconds that no iteration undercuts in which the module is cut like this.

        A stage cannot start before a microbatch came down to it. Then it has all of its own
        work to do; and its last backward has to travel on to the first stages (its last
        forward, where it has no backward, to the loss and from there back). None of the ways
        there and back depend on how modules are cut, so the largest of the modules' bounds
        is one of the whole plan.

        Args:
            module: by name.
            stages: how many it is cut into.
            beyond: stages on the longest path from its output to the loss.
        """
        return self._worst("bound", module, stages, beyond) * (1 - ROUNDING)

    def least_bound(self, module: str, stages: int) -> float:
        """:meth:`lower_bound` of the partition of which it is least, whatever fits in memory.

        Args:
            module: by name.
            stages: how many it is cut into.
        """
        return float(self._tables[module].least[stages - 1]) * (1 - ROUNDING)

    def _worst(self, table: str, module: str, stages: int, beyond: int) -> float:
        ranges = self.partition(module, stages, beyond)
        if ranges is None:
            return math.inf
        values = getattr(self._tables[module], table)
        return float(max(values[lo, hi] for lo, hi in ranges))

    def combinations(self) -> Iterator[Counts]:
        """Stage counts within the budget. Those of a module that memory forbids are among them."""
        modules = self.graph.topological[::-1]  # what decides depth comes first

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
        """The plan for these stage counts.

        Raises:
            NoPlanError: if a module cannot have so many stages.
        """
        partitions = {}
        for node in self.graph.nodes:
            count = counts[node.name]
            ranges = None
            if 1 <= count <= node.num_layers:
                ranges = self.partition(node.name, count, self.beyond(node.name, counts))
            if ranges is None:
                raise NoPlanError(f"module {node.name!r} cannot have {count} stages")
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
        """The plan with these layers per stage, one rank each (and copy)."""
        plan = make_plan(
            self.graph, partitions, self.num_microbatches // self.parts, self.schedule,
            self.profile, self.recompute, self.memory_limit, self.recompute_loss,
        )
        return with_degrees(plan, self.degrees, self.parts)

    @property
    def parts(self) -> int:
        """Equal parts of plans, of which one is looked at."""
        return common_replicas(self.graph, self.degrees) if self.by_part else 1

    def stage_seconds(self, module: str) -> np.ndarray:
        """Seconds of 1F + 1B of layers [lo, hi) as one stage, as partitions balance them: an
        array of shape (n + 1, n + 1)."""
        return self._tables[module].balanced

    @cached_property
    def backward(self) -> dict[str, tuple[bool, ...]]:
        """Per module and layer: does a training step run a backward of it at all?"""
        return has_backward(self.graph)

    @cached_property
    def recomputing(self) -> dict[str, np.ndarray]:
        """Which stages recompute, as of :func:`recomputing`."""
        return recomputing(self.graph, self.recompute, self.recompute_loss)


@dataclass(frozen=True)
class _ModuleTable:
    """Per possible stage of a module, (n + 1, n + 1) arrays over (lo, hi), in seconds:
    what partitions balance, and the lower bound that the stage puts on an iteration."""

    balanced: np.ndarray
    bound: np.ndarray

    @cached_property
    def least(self) -> np.ndarray:
        """(n,) by the number of stages less one, the least of all partitions' bounds."""
        return least_bottlenecks(self.bound)


def _tables(space: StageSpace) -> dict[str, _ModuleTable]:
    works = layer_work(space.graph, space.process_profile)
    # Where B_w is split from B_d it can be put off, so only B_d is sure to hold up others.
    whole = space.schedule in WHOLE_BACKWARD and not space.any_schedule
    forward = {m: np.array([w.forward for w in work]) for m, work in works.items()}
    gradient = {
        m: np.array([w.backward if whole else w.backward_input for w in work])
        for m, work in works.items()
    }
    ways = LongestWays(space.graph, forward, gradient)
    tables = {}
    for module, work in works.items():
        # Sums of gradients are left out: of a bound, and of what is balanced.
        all_work = cost_matrix([w.total for w in work])
        in_time = cost_matrix(forward[module] + gradient[module])  # before the last gradient
        again = np.where(space.recomputing[module], cost_matrix(forward[module]), 0.0)
        all_work, in_time = all_work + again, in_time + again
        # A stage has a backward if its last layer has.
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
