"""Degrees beside the pipeline: how many copies of which module, how many processes per rank.

Around :func:`~raymm.scheduler.search.stage_search.joint_search`, which knows pipelines only. Every
assignment of degrees to modules is one of its spaces, with the costs that processes then have.
All assignments are estimated from the sums of the modules' work (:class:`Estimate`); in the order
of what they promise, the best are searched. What is exact: the search of stage counts under
one assignment, and that an assignment left out because of its bound cannot be better. What is
not: at most ``searches`` assignments are searched, :data:`PER_SINK` for each choice of the
sink's degrees, so a better one may have looked worse than all of them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from raymm.scheduler.costs.layer_costs import layer_work
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.process_costs import all_reduce_seconds, exposed_seconds
from raymm.scheduler.search.module_degrees import (
    ALONE,
    DegreeChoices,
    ModuleDegrees,
    SharedModules,
    process_profile,
)
from raymm.scheduler.search.stage_search import SearchResult, joint_search
from raymm.scheduler.search.stage_space import ROUNDING, StageSearchError, StageSpace

SEARCHES = 24
# Of assignments with the same degrees of the sink, so many are searched.
PER_SINK = 3
# Sharing more is worth it if a step takes less by more than this.
WORTHWHILE = 1e-3
# Assignments that are estimated; of a model with more, encoders get fewer choices.
MOST_ASSIGNMENTS = 20_000


@dataclass(frozen=True)
class Estimate:
    """What an assignment promises.

    Attributes:
        degrees: the assignment.
        seconds: about how long a step takes: a microbatch's way there and back, the slowest
            stage's work on the others, and sums of gradients.
        bound: seconds that no plan with these degrees undercuts.
    """

    degrees: SharedModules
    seconds: float
    bound: float


@dataclass(frozen=True)
class _Module:
    """One module under one choice of degrees; seconds and bytes of a microbatch or a process.

    Attributes:
        work, longest: of all its layers, and of the layer with the most.
        way: forward and backward of one microbatch through all layers.
        reduction: seconds of the gradients' sum, if all layers were one stage.
        least: the fewest stages that memory allows.
        most: as many as it has layers.
        steps: microbatches of a copy.
    """

    degrees: ModuleDegrees
    work: float
    longest: float
    way: float
    reduction: float
    least: int
    most: int
    steps: int

    def load(self, stages: int) -> float:
        """Seconds of a step that one of its stages works at least."""
        return self.steps * max(self.work / stages, self.longest)


def search_degrees(
    space: StageSpace,
    choices: Mapping[str, DegreeChoices],
    per_node: int,
    sharding: str,
    iteration_time: Callable[[Plan], float],
    lower_bound: Callable[[Plan], float],
    fits: Callable[[Plan], bool],
    within: Callable[[StageSpace], StageSpace],
    incumbent: float = math.inf,
    searches: int = SEARCHES,
) -> list[SearchResult]:
    """Plans with degrees that are faster than what is known, the fastest last.

    Args:
        space: without degrees; its ``ranks`` is the number of devices.
        choices: per module, the degrees it may have; none where missing.
        per_node: processes that share a node.
        sharding: of modules that several processes hold; of
            :data:`raymm.scheduler.plan.plan.SHARDINGS`.
        iteration_time, lower_bound, fits: as of ``joint_search``.
        within: gives a space its :attr:`StageSpace.memory`.
        incumbent: seconds of the best plan known.
        searches: how many assignments are searched.
    """
    found: list[SearchResult] = []
    tried: Counter[ModuleDegrees] = Counter()
    for estimate in estimates(space, choices, per_node, sharding):
        sink = estimate.degrees[space.graph.sink]
        if tried[sink] == PER_SINK:
            continue
        tried[sink] += 1
        if tried.total() > searches:
            break
        if estimate.bound * (1 - ROUNDING) >= incumbent * (1 - WORTHWHILE):
            continue
        shared = within(replace(space, degrees=estimate.degrees))
        try:
            result = joint_search(
                shared, iteration_time, lower_bound, fits, alternatives=0,
                incumbent=incumbent * (1 - WORTHWHILE),
            )
        except StageSearchError:  # none fits, or none is faster
            continue
        if result.best.seconds < incumbent * (1 - WORTHWHILE):
            incumbent = result.best.seconds
            found.append(result)
    return found


def estimates(
    space: StageSpace, choices: Mapping[str, DegreeChoices], per_node: int, sharding: str
) -> list[Estimate]:
    """All assignments that may fit, but for the one without degrees, the most promising first; of
    about equally fast ones, those with less shared."""
    options = {}
    room = space.ranks - (len(space.graph.nodes) - 1)
    for node in space.graph.nodes:
        allowed = choices.get(node.name, DegreeChoices())
        options[node.name] = [
            module
            for one in allowed.within(room, per_node, space.num_microbatches, sharding)
            if (module := _module(space, node.name, one)) is not None
        ]
    found = []
    for chosen in itertools.product(*_limited(space, options)):
        estimate = _estimate(space, chosen)
        if estimate is not None and any(one.degrees != ALONE for one in chosen):
            found.append(estimate)
    def order(one: Estimate) -> tuple[float, int, float]:
        about = math.log(one.seconds) // WORTHWHILE if one.seconds else 0.0
        return about, sum(d.devices for d in one.degrees.values()), one.seconds

    return sorted(found, key=order)


def _limited(space: StageSpace, options: Mapping[str, list[_Module]]) -> list[list[_Module]]:
    """Every module's options; if those make too many assignments, the ones before the sink
    lose context parallelism, then tensor parallelism, then copies."""
    sink = space.graph.sink
    kept = dict(options)
    for kind in ("cp", "tp", "dp"):
        if math.prod(len(some) for some in kept.values()) <= MOST_ASSIGNMENTS:
            break
        for name, some in kept.items():
            if name != sink:
                kept[name] = [m for m in some if getattr(m.degrees, kind) == 1] or some[:1]
    return [kept[node.name] for node in space.graph.nodes]


def _module(space: StageSpace, name: str, degrees: ModuleDegrees) -> _Module | None:
    """None if it does not fit in memory in however many stages."""
    graph, node = space.graph, space.graph.node(name)
    profile = process_profile(graph, space.profile, {name: degrees})
    work = layer_work(graph, profile, space.recompute)[name]
    layers = profile.modules[name]
    steps = space.num_microbatches // degrees.dp
    least = 1
    sharers = degrees.dp * degrees.cp
    if space.memory_limit is not None:
        moments = sharers if degrees.sharding == "zero1" else 1
        state = sum(
            profile.state_bytes(c, t, moments)
            for c, t in zip(layers, node.trainable, strict=True)
        )
        kept = sum(
            c.activation_bytes for c, b in zip(layers, space.backward[name], strict=True) if b
        )
        for least in range(1, node.num_layers + 1):
            live = 1 if space.recompute else min(least, steps)
            if (state + live * kept) / least <= space.memory_limit:
                break
        else:
            return None
    trained = sum(
        c.parameter_bytes for c, t in zip(layers, node.trainable, strict=True) if t
    )
    links = profile.links
    near = links and links.between(range(degrees.devices))
    return _Module(
        degrees, sum(w.total for w in work), max(w.total for w in work),
        sum(w.forward + w.recompute + w.backward_input for w in work),
        all_reduce_seconds(trained, sharers, near) if trained else 0.0,
        least, node.num_layers, steps,
    )


def _estimate(space: StageSpace, chosen: tuple[_Module, ...]) -> Estimate | None:
    counts = _split_over(space.ranks, chosen)
    if counts is None:
        return None
    loads = [module.load(n) for module, n in zip(chosen, counts, strict=True)]
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
    path = longest[space.graph.sink]
    seconds = max(path - m.way + wait for m, wait in zip(chosen, waits, strict=True))
    degrees = {n.name: m.degrees for n, m in zip(space.graph.nodes, chosen, strict=True)}
    return Estimate(degrees, max(seconds, path), max(loads))


def _split_over(devices: int, chosen: tuple[_Module, ...]) -> list[int] | None:
    """Stages per module so that the largest load is least: every further stage goes to the
    module that has it. None if memory asks for more than there are devices."""
    counts = [module.least for module in chosen]
    left = devices - sum(m.degrees.devices * n for m, n in zip(chosen, counts, strict=True))
    if left < 0:
        return None
    while True:
        loads = [module.load(n) for module, n in zip(chosen, counts, strict=True)]
        at = loads.index(max(loads))
        module = chosen[at]
        if module.degrees.devices > left or counts[at] == module.most:
            return counts
        counts[at] += 1
        left -= module.degrees.devices
