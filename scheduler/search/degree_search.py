"""Search for degrees in addition to pipeline stages: replicas per module, and processes per rank.

Built around :func:`~raymm.scheduler.search.stage_search.joint_search`, which searches pipelines
only. Each assignment of degrees to modules defines one of its spaces, with the costs that processes
then have. All assignments are estimated from the sums of the modules' work (:class:`Estimate`) and
searched in the order of these estimates. An assignment is skipped only if its bound shows that none
of its plans is faster than the best known plan.

If there are few plans (:func:`are_few`), all assignments are searched with all schedules, which is
exact to within the search's ``gap``. Otherwise at most :data:`SEARCHES` assignments are searched,
and at most :data:`PER_BACKBONE` for each choice of the backbone's degrees, so the best one may be
missed.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from raymm.errors import NoPlanError
from raymm.scheduler.costs.layer_costs import CostProfile, layer_work
from raymm.scheduler.costs.recomputation import savings
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.progress.search_control import SearchControl
from raymm.scheduler.schedule.process_costs import (
    all_reduce_seconds,
    exposed_seconds,
    stage_layers,
)
from raymm.scheduler.search.module_degrees import (
    DegreeChoices,
    ModuleDegrees,
    SharedModules,
    process_profile,
)
from raymm.scheduler.search.stage_search import SearchResult, joint_search
from raymm.scheduler.search.stage_space import ROUNDING, StageSpace

# Most assignments to search if there are many plans: in total, and with the same degrees of the
# backbone.
SEARCHES, PER_BACKBONE = 24, 3
# Up to this many plans of one schedule (assignments times stage counts), all assignments are
# searched.
FEW_PLANS = 2_000
# Relative improvement of the step time that justifies higher degrees.
WORTHWHILE = 1e-3
LEAST_PLANS = 8
# Most assignments; if there are more, encoders get fewer choices. Of these, the MOST_ESTIMATED with
# the least work and path are estimated.
MOST_ASSIGNMENTS, MOST_ESTIMATED = 2_000_000, 4_000
# Limit of stages times microbatches of a part, if only one of a plan's equal parts is evaluated.
# Assignments with larger parts have fewer replicas of all modules than others with similar
# estimates.
MOST_TASKS = 16_384


@dataclass(frozen=True)
class Estimate:
    """Estimate for an assignment.

    Attributes:
        seconds: estimated step time: path of a microbatch to the loss and back, work of the slowest
            stage on the other microbatches, and gradient sums.
        bound: lower bound of the seconds of all plans with these degrees.
        tasks: approximate number of stages that the microbatches of one of the plan's equal parts
            pass through.
    """

    degrees: SharedModules
    seconds: float
    bound: float
    tasks: int


@dataclass(frozen=True)
class _Memory:
    """Memory of one module on one process, if all its layers were one stage.

    Attributes:
        limit: bytes per device; None for no limit.
        state: bytes of weights and optimizer state.
        sizes, seconds: bytes of a microbatch's activations, ascending, and the seconds added by
            keeping no more; linear in between.
        holds: True if a stage holds the activations of all its microbatches in flight, not only of
            one.
    """

    limit: int | None
    state: int
    sizes: np.ndarray
    seconds: np.ndarray
    holds: bool

    def added(self, stages: int, steps: int) -> float:
        """Return the seconds that memory limits add to a microbatch, over ``stages`` stages of
        equally many layers; ``inf`` if memory does not suffice for any partition."""
        if self.limit is None:
            return 0.0
        lives = np.minimum(np.arange(stages, 0, -1), steps if self.holds else 1)
        free = self.limit - self.state / stages
        if free < lives.mean() * self.sizes[0] / stages:
            return math.inf
        return float(np.interp(free / lives * stages, self.sizes, self.seconds).mean())


@dataclass(frozen=True)
class _Module:
    """One module with one choice of degrees; seconds per microbatch, and bytes per process.

    Attributes:
        work, longest: seconds of all its layers, and of the longest layer.
        spared: upper bound of the work saved, relative to a stage's work, in stages that do not
            recompute while others do. ``longest`` excludes it, because any layer may be in such a
            stage.
        way: forward and backward of one microbatch through all layers.
        reduction: seconds of the gradient sum, if all layers were one stage.
        least: fewest stages that memory allows.
    """

    degrees: ModuleDegrees
    work: float
    longest: float
    spared: float
    way: float
    reduction: float
    memory: _Memory
    least: int
    most: int
    steps: int

    @cached_property
    def loads(self) -> list[float]:
        """Approximate seconds of a step in each stage, by the number of stages (from :attr:`least`
        on)."""
        return [math.inf] * self.least + [
            self._seconds(self.work + self.memory.added(n, self.steps), n)
            for n in range(self.least, self.most + 1)
        ]

    @cached_property
    def bounds(self) -> list[float]:
        """Lower bounds of :attr:`loads`, without the time that memory limits add."""
        return [math.inf, *(self._seconds(self.work, n) for n in range(1, self.most + 1))]

    def _seconds(self, work: float, stages: int) -> float:
        # No stage works longer than the busiest one, which saves at most ``spared`` of its work.
        return self.steps * max(work / (stages + self.spared), self.longest)


def search_degrees(
    space: StageSpace,
    estimated: Sequence[Estimate],
    iteration_time: Callable[[Plan], float],
    lower_bound: Callable[[Plan], float],
    fits: Callable[[Plan], bool],
    within: Callable[[StageSpace], StageSpace],
    incumbent: float = math.inf,
    searches: float = SEARCHES,
    per_backbone: float = PER_BACKBONE,
    gap: float = ROUNDING,
    most_stages: float = math.inf,
    control: SearchControl | None = None,
) -> list[SearchResult]:
    """Return plans with degrees that are faster than the incumbent, the fastest last.

    Args:
        space: space without degrees; its ``ranks`` is the number of devices.
        estimated: assignments in the order in which to search them.
        iteration_time, lower_bound, fits, gap, control: as in ``joint_search``.
        within: adds :attr:`StageSpace.memory` to a space.
        incumbent: seconds of the best known plan, as measured by ``iteration_time``.
        per_backbone: most assignments to search with the same degrees of the backbone.
        most_stages: most stages of all plans (or equal parts of plans) made for an assignment, most
            promising plans first; at least :data:`LEAST_PLANS` plans are made.
    """
    results: list[SearchResult] = []
    tried: Counter[ModuleDegrees] = Counter()
    if space.by_part:
        estimated = [e for e in estimated if e.tasks <= MOST_TASKS] or estimated
    for estimate in estimated:
        if control is not None and control.should_stop():
            break
        degrees = estimate.degrees[space.graph.backbone]
        if tried[degrees] == per_backbone:
            continue
        tried[degrees] += 1
        if tried.total() > searches:
            break
        if estimate.bound * (1 - ROUNDING) >= incumbent * (1 - WORTHWHILE):
            continue
        shared = within(replace(space, degrees=estimate.degrees))
        try:
            result = joint_search(
                shared, iteration_time, lower_bound, fits, alternatives=0, gap=gap,
                most_plans=max(LEAST_PLANS, most_stages * shared.parts // space.ranks),
                incumbent=incumbent * (1 - WORTHWHILE), control=control,
            )
        except NoPlanError:  # none fits, or none is faster
            continue
        if result.best.seconds < incumbent * (1 - WORTHWHILE):
            incumbent = result.best.seconds
            results.append(result)
    return results


def are_few(space: StageSpace, estimated: Sequence[Estimate]) -> bool:
    """Return True if assignments have at most :data:`FEW_PLANS` plans of one schedule together."""
    if len(estimated) > FEW_PLANS:
        return False
    plans = itertools.chain.from_iterable(
        replace(space, degrees=estimate.degrees).combinations() for estimate in estimated
    )
    return next(itertools.islice(plans, FEW_PLANS, None), None) is None


def estimates(
    space: StageSpace, choices: Mapping[str, DegreeChoices], per_node: int, sharding: str,
    control: SearchControl | None = None,
) -> list[Estimate]:
    """Return all assignments that may fit, the most promising first. Among about equally fast ones,
    those with fewer devices come first.

    Args:
        choices: accepted degrees by module; other modules have no degrees.
        per_node: devices per node, the limit of tensor-parallel groups.
        sharding: sharding of modules with several processes that split microbatches: ``"none"``,
            ``"zero1"`` or ``"fsdp"``.
        control: ends the estimation after the first assignment if the search must end.
    """
    options = {}
    room = space.ranks - (len(space.graph.nodes) - 1)
    for node in space.graph.nodes:
        allowed = choices.get(node.name, DegreeChoices())
        options[node.name] = [
            module
            for degrees in allowed.within(room, per_node, space.num_microbatches, sharding)
            if (module := _module(space, node.name, degrees)) is not None
        ]
    estimated = []
    for chosen in _promising(space, _limited(space, options)):
        if control is not None and (control.should_stop() or estimated and control.stopped):
            break
        estimate = _estimate(space, chosen)
        if estimate is not None:
            estimated.append(estimate)
    def order(estimate: Estimate) -> tuple[float, int, float]:
        about = math.log(estimate.seconds) // WORTHWHILE if estimate.seconds else 0.0
        return about, sum(d.devices for d in estimate.degrees.values()), estimate.seconds

    return sorted(estimated, key=order)


def _limited(space: StageSpace, options: Mapping[str, list[_Module]]) -> list[list[_Module]]:
    """Return the options of each module. If they make too many assignments, all modules but the
    backbone lose context parallelism, then tensor parallelism, then replicas."""
    kept = dict(options)
    for kind in ("cp", "tp", "dp"):
        if math.prod(len(some) for some in kept.values()) <= MOST_ASSIGNMENTS:
            break
        for name, some in kept.items():
            if name != space.graph.backbone:
                kept[name] = [m for m in some if getattr(m.degrees, kind) == 1] or some[:1]
    return [kept[node.name] for node in space.graph.nodes]


def _promising(
    space: StageSpace, options: list[list[_Module]]
) -> Iterator[tuple[_Module, ...]]:
    """Yield all assignments, or at most :data:`MOST_ESTIMATED` with the least sum of path and
    work."""
    shape = [len(some) for some in options]
    if math.prod(shape) <= MOST_ESTIMATED:
        yield from itertools.product(*options)
        return
    names = [node.name for node in space.graph.nodes]

    def table(value: Callable[[_Module], float]) -> dict[str, np.ndarray]:
        """Return the values by module, each along a separate axis."""
        return {
            name: np.array([value(module) for module in some]).reshape(
                [-1 if axis == at else 1 for axis in range(len(shape))]
            )
            for at, (name, some) in enumerate(zip(names, options, strict=True))
        }

    ways = table(lambda module: module.way)
    longest: dict[str, np.ndarray] = {}
    for name in space.graph.topological:
        before = [longest[producer] for producer in space.graph.producers(name)]
        longest[name] = ways[name] + functools.reduce(np.maximum, before, np.zeros(1))
    devices = sum(table(lambda m: m.least * m.degrees.devices).values(), np.zeros(shape))
    work = sum(table(lambda m: m.steps * m.work * m.degrees.devices).values(), np.zeros(shape))
    about = functools.reduce(np.maximum, longest.values()) + work / space.ranks
    about[devices > space.ranks] = np.inf
    for flat in np.argsort(about, axis=None)[:MOST_ESTIMATED].tolist():
        places = np.unravel_index(flat, shape)
        yield tuple(some[place] for some, place in zip(options, places, strict=True))


def _module(space: StageSpace, name: str, degrees: ModuleDegrees) -> _Module | None:
    """Return None if the module does not fit in memory with any number of stages."""
    graph, node = space.graph, space.graph.node(name)
    profile = process_profile(graph, space.profile, {name: degrees})
    work = layer_work(graph, profile, space.recompute)[name]
    layers = stage_layers(profile.modules[name], 0, node.num_layers)
    steps = space.num_microbatches // degrees.dp
    sharers = degrees.dp * degrees.cp
    memory = _memory(space, profile, name, sharers if degrees.sharding == "zero1" else 1)
    least = next(
        (n for n in range(1, node.num_layers + 1) if memory.added(n, steps) < math.inf), None
    )
    if least is None:
        return None
    trained = sum(
        c.trained_bytes for c, t in zip(layers, node.trainable, strict=True) if t
    )
    links = profile.links
    near = links and links.between(range(degrees.devices))
    # Stages that do not recompute: that of the loss, whose activations are still present when
    # needed, and one that begins with layers without backward, which keeps those of its other
    # layers.
    keeping = space.recompute * (
        (name in graph.losses and not space.recompute_loss) + (not space.backward[name][0])
    )
    once = [w.total - w.recompute if keeping else w.total for w in work]
    shares = (w.recompute / least for w, least in zip(work, once, strict=True) if least)
    spared = max(shares, default=0.0) * keeping
    return _Module(
        degrees, sum(w.total for w in work), max(once), spared,
        sum(w.forward + w.recompute + w.backward_input for w in work),
        all_reduce_seconds(trained, sharers, near) if trained else 0.0,
        memory, least, node.num_layers, steps,
    )


def _memory(space: StageSpace, profile: CostProfile, name: str, moments: int) -> _Memory:
    """Return the memory of a module; ``moments`` processes shard the optimizer's moments."""
    node = space.graph.node(name)
    layers = stage_layers(profile.modules[name], 0, node.num_layers)
    state = sum(
        profile.state_bytes(c, t, moments) for c, t in zip(layers, node.trainable, strict=True)
    )
    held = [c for c, b in zip(layers, space.backward[name], strict=True) if b]
    if space.memory is None or not space.memory.adaptive:
        kept = np.array([float(sum(c.activation_bytes for c in held))])
        return _Memory(space.memory_limit, state, kept, np.zeros(1), not space.recompute)
    sizes, seconds = savings([c.choices for c in held])
    return _Memory(space.memory_limit, state, sizes, seconds, True)


def _estimate(space: StageSpace, chosen: tuple[_Module, ...]) -> Estimate | None:
    counts = _split_over(space.ranks, chosen, [module.loads for module in chosen])
    if counts is None:
        return None
    loads = [module.loads[n] for module, n in zip(chosen, counts, strict=True)]
    waits = [
        module.way
        + (module.steps - 1) / module.steps * load
        + exposed_seconds(module.reduction / n, module.work / n)
        for module, load, n in zip(chosen, loads, counts, strict=True)
    ]
    ways = {n.name: m.way for n, m in zip(space.graph.nodes, chosen, strict=True)}
    longest: dict[str, float] = {}
    for name in space.graph.topological:
        before = max((longest[p] for p in space.graph.producers(name)), default=0.0)
        longest[name] = before + ways[name]
    path = max(longest.values())
    seconds = max(path - m.way + wait for m, wait in zip(chosen, waits, strict=True))
    degrees = {n.name: m.degrees for n, m in zip(space.graph.nodes, chosen, strict=True)}
    if any(len(module.memory.sizes) > 1 for module in chosen):
        # Without the time that memory adds, another split may be better.
        counts = _split_over(space.ranks, chosen, [module.bounds for module in chosen])
        assert counts is not None
    bound = max(module.bounds[n] for module, n in zip(chosen, counts, strict=True))
    parts = math.gcd(*(d.dp for d in degrees.values()))
    tasks = sum(counts) * space.num_microbatches // parts
    return Estimate(degrees, max(seconds, path), bound, tasks)


def _split_over(
    devices: int, chosen: tuple[_Module, ...], loads: list[list[float]]
) -> list[int] | None:
    """Return stages per module with the least largest load: each further stage goes to the module
    with the largest load. Return None if there are too few devices for memory."""
    counts = [module.least for module in chosen]
    left = devices - sum(m.degrees.devices * n for m, n in zip(chosen, counts, strict=True))
    if left < 0:
        return None
    largest = [(-load[n], at) for at, (load, n) in enumerate(zip(loads, counts, strict=True))]
    heapq.heapify(largest)
    while True:
        at = largest[0][1]
        width = chosen[at].degrees.devices
        if width > left or counts[at] == chosen[at].most:
            return counts
        counts[at] += 1
        left -= width
        heapq.heapreplace(largest, (-loads[at][counts[at]], at))
