"""Plans made of blocks: sets of modules, each set on separate devices.

A block of one module may be a pipeline whose stages split samples over several devices. In a block
of several modules, all of them run on all devices of the block, split by samples, on quotas or in
turns. A pipeline may have guests: unsplit modules that take turns with its stages on some of the
devices. Stages with guests get fewer layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from raymm.scheduler.costs.layer_costs import CostProfile, layer_work
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.plan.stage_edges import SAMPLES
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.search.options import SEARCHED_SCHEDULES
from raymm.scheduler.search.partition import Ranges, partition_matrix
from raymm.scheduler.search.stage_space import StageSpace

# Up to this many quotas of a block are all tried; of more, only those near the balanced ones.
MOST_QUOTAS = 12
# Numbers of microbatches are halved up to this many times.
MOST_HALVED = 3


class Guest(NamedTuple):
    """A module on ``copies`` consecutive devices of another module's pipeline, from device
    ``first``."""

    module: str
    first: int
    copies: int


class Block(NamedTuple):
    """Modules and their arrangement on the devices of the block.

    Attributes:
        modules: in the order of the data flow.
        stages: pipeline stages; above 1 only if there is one module.
        copies: devices per stage, which split every microbatch by samples.
        quotas: quota of each module, in steps; empty if the modules take turns.
        guests: modules on devices of the pipeline; only if there is one module.
    """

    modules: tuple[str, ...]
    stages: int = 1
    copies: int = 1
    quotas: tuple[int, ...] = ()
    guests: tuple[Guest, ...] = ()

    @property
    def devices(self) -> int:
        return self.stages * self.copies


class Layout(NamedTuple):
    """Blocks that together have every module once, and the number of microbatches per step."""

    blocks: tuple[Block, ...]
    microbatches: int

    @property
    def devices(self) -> int:
        return sum(block.devices for block in self.blocks)


@dataclass(frozen=True)
class StyleProblem:
    """Input of a search that mixes styles.

    Attributes:
        profiles: cost profile with scaling surfaces, by number of microbatches per step.
        memory_limit: bytes per device; None means no limit.
        steps: quota steps per device; 1 means no quotas.
        whole: modules that cannot be split into stages.
        schedules: the search uses the first schedule and tries the others on the best layouts.
    """

    graph: ModuleGraph
    profiles: Mapping[int, CostProfile]
    ranks: int
    memory_limit: int | None = None
    network: Network = field(default_factory=Network)
    steps: int = 10
    whole: frozenset[str] = frozenset()
    schedules: tuple[str, ...] = SEARCHED_SCHEDULES

    @cached_property
    def _spaces(self) -> dict[int, StageSpace]:
        ranks = max(self.ranks, len(self.graph.nodes))
        return {
            count: StageSpace(self.graph, profile, ranks, count)
            for count, profile in self.profiles.items()
        }

    @cached_property
    def _work(self) -> dict[int, dict[str, float]]:
        return {
            count: {
                name: sum(layer.total for layer in layers)
                for name, layers in layer_work(self.graph, profile).items()
            }
            for count, profile in self.profiles.items()
        }

    def alone(self, microbatches: int, module: str, copies: int, quota: float = 1.0) -> float:
        """Return the seconds of a microbatch of a module that runs alone on ``copies`` devices,
        which split the samples, with a quota of each. ``microbatches`` is the number per step."""
        sharing = self.profiles[microbatches].sharing
        slower = 1 / copies / quota
        if sharing is not None:
            slower = sharing.seconds(module, copies, {module: quota})
        return self._work[microbatches][module] * slower

    def most_copies(self, microbatches: int, module: str) -> int:
        """Return the largest number of devices that the module's surface covers."""
        sharing = self.profiles[microbatches].sharing
        return 1 if sharing is None else sharing.most_devices(module)

    def partition(
        self, microbatches: int, module: str, stages: int, added: tuple[float, ...] = ()
    ) -> Ranges | None:
        """Return balanced layer ranges for a number of stages; None if there cannot be so many.
        ``added`` is additional seconds of work on the devices of each stage, scaled to one
        device."""
        if stages > 1 and module in self.whole:
            return None
        space = self._spaces[microbatches]
        if not any(added):
            return space.partition(module, stages)
        key = microbatches, module, stages, added
        if key not in self._unequal:
            layers = self.graph.node(module).num_layers
            self._unequal[key] = None if stages > layers else partition_matrix(
                np.stack([space.stage_seconds(module) + seconds for seconds in added]), stages
            )
        return self._unequal[key]

    @cached_property
    def _unequal(self) -> dict[tuple[int, str, int, tuple[float, ...]], Ranges | None]:
        return {}

    def guest_seconds(self, microbatches: int, block: Block) -> list[float]:
        """Return the seconds per microbatch that guests take on each device of a block."""
        seconds = [0.0] * block.devices
        for guest in block.guests:
            for device in range(guest.first, guest.first + guest.copies):
                seconds[device] += self.alone(microbatches, guest.module, guest.copies)
        return seconds

    def _ranges(self, microbatches: int, block: Block, module: str) -> Ranges | None:
        """Return the layer ranges of a block's module, with fewer layers where guests run."""
        if not block.guests:
            return self.partition(microbatches, module, block.stages)
        # A stage on several devices takes ``share`` of the time on one device.
        share = self.alone(microbatches, module, block.copies) / self.alone(microbatches, module, 1)
        seconds = self.guest_seconds(microbatches, block)
        added = tuple(
            max(seconds[first : first + block.copies]) / share
            for first in range(0, block.devices, block.copies)
        )
        return self.partition(microbatches, module, block.stages, added)

    def bound(self, layout: Layout) -> float:
        """Return a lower bound of the step time in seconds, valid if no module gets faster on a
        smaller share of a device."""
        most = 0.0
        for block in layout.blocks:
            times = [
                self.alone(layout.microbatches, module, block.copies) for module in block.modules
            ]
            guests = self.guest_seconds(layout.microbatches, block)
            work = sum(times) / block.stages + sum(guests) / block.devices
            most = max(most, max(times) if block.quotas else work, *guests)
        return most * layout.microbatches

    def allowed(self, layout: Layout) -> bool:
        """Return True if there are enough devices and every module can run as its block says."""
        return layout.devices <= self.ranks and all(
            block.copies & (block.copies - 1) == 0
            and (len(block.modules) == 1 or block.stages == 1)
            and sum(block.quotas) <= self.steps
            and self._may_have_guests(layout.microbatches, block)
            and all(
                block.copies <= self.most_copies(layout.microbatches, module)
                and self._ranges(layout.microbatches, block, module) is not None
                for module in block.modules
            )
            for block in layout.blocks
        )

    def _may_have_guests(self, microbatches: int, block: Block) -> bool:
        return not block.guests or (len(block.modules) == 1 and all(
            guest.copies & (guest.copies - 1) == 0
            and 0 <= guest.first <= block.devices - guest.copies
            and guest.copies <= self.most_copies(microbatches, guest.module)
            for guest in block.guests
        ))

    def plan(self, layout: Layout, schedule: str, recompute: bool = False) -> Plan:
        stages: list[Stage] = []
        first = 0
        for block in layout.blocks:
            for place, module in enumerate(block.modules):
                ranges = self._ranges(layout.microbatches, block, module)
                assert ranges is not None, "layouts have only blocks that can be cut"
                quota = block.quotas[place] / self.steps if block.quotas else None
                stages += [
                    Stage(
                        module, index, layers, first + index * block.copies + copy, copy,
                        recompute=recompute and module not in self.graph.losses,
                        quota=quota, split=SAMPLES if block.copies > 1 else "microbatches",
                    )
                    for copy in range(block.copies) for index, layers in enumerate(ranges)
                ]
            for guest in block.guests:
                layers = 0, self.graph.node(guest.module).num_layers
                stages += [
                    Stage(
                        guest.module, 0, layers, first + guest.first + copy, copy,
                        recompute=recompute and guest.module not in self.graph.losses,
                        split=SAMPLES if guest.copies > 1 else "microbatches",
                    )
                    for copy in range(guest.copies)
                ]
            first += block.devices
        return Plan(
            self.graph, tuple(stages), layout.microbatches, schedule,
            self.profiles[layout.microbatches], self.memory_limit,
        )


def halved_counts(microbatches: int) -> list[int]:
    """Return the number of microbatches and its halves, as long as they are whole numbers."""
    times = range(MOST_HALVED + 1)
    return [microbatches >> n for n in times if microbatches % (1 << n) == 0]


def layouts(problem: StyleProblem) -> Iterator[Layout]:
    """Yield every layout without guests. Blocks of many modules get only some of the quotas."""
    for count in sorted(problem.profiles):
        for groups in _partitions(problem.graph.topological):
            options = [list(_blocks(problem, count, group)) for group in groups]
            for blocks in product(*options):
                layout = Layout(blocks, count)
                if problem.allowed(layout):
                    yield layout


def _partitions(modules: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield all partitions of the modules into groups."""
    if not modules:
        yield ()
        return
    first, rest = modules[0], modules[1:]
    for groups in _partitions(rest):
        yield ((first,), *groups)
        for at, group in enumerate(groups):
            yield (*groups[:at], (first, *group), *groups[at + 1 :])


def _blocks(problem: StyleProblem, count: int, group: tuple[str, ...]) -> Iterator[Block]:
    copies = 1
    while copies <= problem.ranks:
        if len(group) > 1:
            yield from (Block(group, 1, copies, q) for q in quota_choices(
                problem, count, group, copies
            ))
        else:
            yield from (
                Block(group, stages, copies) for stages in range(1, problem.ranks // copies + 1)
            )
        copies *= 2


def quota_choices(
    problem: StyleProblem, microbatches: int, modules: tuple[str, ...], copies: int
) -> list[tuple[int, ...]]:
    """Return quotas for modules on the same ``copies`` devices: no quotas, and all quotas that sum
    to the whole device. If those are many, return the balanced ones and a few that differ by one
    step."""
    count = len(modules)
    if count < 2 or count > problem.steps:
        return [()]
    every = _compositions(problem.steps, count, MOST_QUOTAS)
    if every is not None:
        return [(), *every]
    quotas = [1] * count
    for _ in range(problem.steps - count):  # each step goes to the slowest module
        slowest = max(range(count), key=lambda i: problem.alone(
            microbatches, modules[i], copies, quotas[i] / problem.steps
        ))
        quotas[slowest] += 1
    balanced = tuple(quotas)
    # Move one step from the module with the largest quota to another.
    fullest = max(range(count), key=lambda i: balanced[i])
    moved = [
        tuple(q - (i == fullest) + (i == to) for i, q in enumerate(balanced))
        for to in range(count) if to != fullest and balanced[fullest] > 1
    ]
    return [(), balanced, *moved[:2]]


def _compositions(total: int, parts: int, most: int) -> list[tuple[int, ...]] | None:
    """Return all ordered sums of ``parts`` positive numbers; None if there are more than
    ``most``."""
    sums: list[tuple[int, ...]] = [()]
    for left in range(parts, 0, -1):
        sums = [
            (*head, part) for head in sums
            for part in (
                [total - sum(head)] if left == 1 else range(1, total - sum(head) - left + 2)
            )
        ]
        if len(sums) > most:
            return None
    return sums
