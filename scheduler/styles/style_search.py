"""Search over plans that mix styles.

The search starts from the best pipelines and the best mapping. It tries all layouts if there are
few, and otherwise makes local moves from several starting points. The simulator judges all plans
with messages, surfaces, interference and memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from raymm.errors import NoPlanError
from raymm.plural import plural
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.progress.search_control import SearchControl
from raymm.scheduler.search.evaluation import Option, evaluate, limit_text
from raymm.scheduler.styles.blocks import (
    Block,
    Guest,
    Layout,
    StyleProblem,
    layouts,
    quota_choices,
)

OWN, QUOTA, IN_TIME = "separate devices", "a quota next to others", "turns with others"
BETWEEN = "between the styles"
# Up to FEW_LAYOUTS layouts are all tried, except those that a bound rules out. A local search from
# one starting point tries at most MOST_TRIED plans.
FEW_LAYOUTS = 1_500
MOST_TRIED = 250
FINALISTS = 2
# Number of best layouts to start local moves from, after all layouts were tried.
BEGINNINGS = 4
ROUNDING = 1e-9


@dataclass(frozen=True)
class StyleSearch:
    """Result of a search that mixes styles.

    Attributes:
        ways: seconds of the fastest plan tried, by module and way (:func:`way_of`).
        exhaustive: True if no other layout without guests is faster.
    """

    best: Option
    starts: Mapping[str, Option]
    ways: Mapping[tuple[str, str], float]
    tried: int
    exhaustive: bool

    def lines(self) -> list[str]:
        """Return one line per module: where the module runs, and the step time of the fastest plan
        that runs the module in another way."""
        plan, result = self.best.plan, []
        for node in plan.graph.nodes:
            own = way_of(plan, node.name)
            others = [
                f"with {way} {self.ways[node.name, way] / self.best.seconds - 1:+.1%}"
                for way in (OWN, QUOTA, IN_TIME)
                if way != own and (node.name, way) in self.ways
            ]
            result.append(
                f"{node.name}: {_place(plan, node.name)}; "
                + (f"the fastest plan {', '.join(others)}" if others else "no other way was found")
            )
        return result


def way_of(plan: Plan, module: str) -> str:
    """Return the way in which a module uses its devices: alone, on a quota, or in turns."""
    stages = plan.module_stages(module)
    together = [
        other for stage in stages for other in plan.rank_stages(stage.rank)
        if other.module != module
    ]
    if not together:
        return OWN
    shares = any(
        other.quota is not None and other.slot == stage.slot
        for stage in stages if stage.quota is not None
        for other in together if other.rank == stage.rank
    )
    return QUOTA if shares else IN_TIME


def _place(plan: Plan, module: str) -> str:
    replicas = plan.replicas(module)
    ranks = sorted({stage.rank for stage in plan.module_stages(module)})
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
    stages = len(replicas[0])
    texts: list[str] = []
    if stages > 1:
        texts.append(f"a pipeline of {plural(stages, 'stage')}")
    if len(replicas) > 1:
        texts.append(plural(len(replicas), "replica"))
    first = plan.module_stages(module)[0]
    if (way := way_of(plan, module)) == QUOTA:
        neighbors = sorted({
            other.module for stage in plan.module_stages(module)
            for other in plan.rank_stages(stage.rank)
            if other.module != module and other.slot == stage.slot and other.quota is not None
        })
        texts.append(f"a quota of {first.quota:g} next to {', '.join(neighbors)}")
    else:
        texts.append(way)
    slot = "" if first.slot is None else f", slot {first.slot}"
    return f"{', '.join(texts)} ({where}{slot})"


def search_between(
    problem: StyleProblem, starts: Mapping[str, Option], control: SearchControl | None = None
) -> StyleSearch:
    """Return the fastest plan found, which is never slower than any of the starting points.
    ``starts`` are the best plans of each style, which fit in memory and were judged by the same
    profiles; ``control`` may end the search early. Raise ``NoPlanError`` if no plan fits in
    memory."""
    candidates = _Candidates(problem, starts, control or SearchControl())
    is_small = len(problem.graph.nodes) <= 4 and problem.ranks <= 8
    few = list(islice(layouts(problem), FEW_LAYOUTS + 1)) if is_small else []
    exhaustive = 0 < len(few) <= FEW_LAYOUTS
    if exhaustive:
        for layout in sorted(few, key=problem.bound):
            candidates.seconds(layout)
        exhaustive = candidates.control.stopped is None
        beginnings = candidates.fastest(BEGINNINGS)
    else:
        beginnings = [
            layout for count in sorted(problem.profiles, reverse=True)
            for layout in _beginnings(problem, count, starts.values())
        ]
    for layout in beginnings:
        _descend(problem, candidates, layout)
    candidates.finish()
    if candidates.best is None:
        raise NoPlanError("no plan fits, neither of one style nor of a mix of both")
    return StyleSearch(candidates.best, starts, candidates.ways, candidates.tried, exhaustive)


@dataclass
class _Candidates:
    problem: StyleProblem
    starts: Mapping[str, Option]
    control: SearchControl
    best: Option | None = None
    ways: dict[tuple[str, str], float] = field(default_factory=dict)
    tried: int = 0
    _seconds: dict[Layout, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.control.searching(BETWEEN)
        for option in self.starts.values():
            self._keep(option)

    def seconds(self, layout: Layout) -> float:
        """Return the step time; infinite if the plan does not fit or cannot be faster than the
        best."""
        if layout not in self._seconds:
            self._seconds[layout] = float("inf")
            most = self.best.seconds if self.best else float("inf")
            if self.problem.bound(layout) * (1 - ROUNDING) < most and not self._is_over:
                self._seconds[layout] = self._evaluated(layout, self.problem.schedules[0])
        return self._seconds[layout]

    @property
    def _is_over(self) -> bool:
        return self.control.should_stop()

    def _evaluated(self, layout: Layout, schedule: str) -> float:
        again = (False,) if self.problem.memory_limit is None else (False, True)
        for recompute in again:
            plan = self.problem.plan(layout, schedule, recompute)
            option, unfit = evaluate(plan, self.problem.network, BETWEEN)
            self.tried += 1
            self.control.tried()
            if unfit is None:
                self._keep(option)
                return option.seconds
        return float("inf")

    def fastest(self, count: int) -> list[Layout]:
        return sorted(self._seconds, key=self._seconds.__getitem__)[:count]

    def finish(self) -> None:
        for layout in self.fastest(FINALISTS):
            for schedule in self.problem.schedules[1:]:
                if self._seconds[layout] < float("inf") and not self._is_over:
                    self._evaluated(layout, schedule)

    def _keep(self, option: Option) -> None:
        plan, seconds = option.plan, option.seconds
        self.control.fits(seconds, lambda: limit_text(plan, seconds))
        for node in plan.graph.nodes:
            key = node.name, way_of(plan, node.name)
            self.ways[key] = min(seconds, self.ways.get(key, float("inf")))
        if self.best is None or seconds < self.best.seconds:
            self.best = option


def _beginnings(
    problem: StyleProblem, count: int, starts: Iterable[Option]
) -> Iterator[Layout]:
    graph, modules = problem.graph, problem.graph.topological
    rest = {graph.backbone, *graph.followers}
    before = tuple(m for m in modules if m not in rest)
    after = tuple(m for m in modules if m in graph.followers)
    candidates = [
        [Block((module,)) for module in modules],
        [Block(group) for group in (before, (graph.backbone,), after) if group],
        [Block((*before, *after)), Block((graph.backbone,))] if before or after else [],
        [Block(modules)],
    ]
    candidates += [
        [Block((m,), len(option.plan.replicas(m)[0])) for m in modules] for option in starts
    ]
    seen = set()
    for blocks in candidates:
        layout = Layout(tuple(blocks), count)
        if blocks and layout not in seen and problem.allowed(layout):
            seen.add(layout)
            yield layout


def _descend(problem: StyleProblem, candidates: _Candidates, layout: Layout) -> None:
    """Move to the best neighbouring layout until none is better. Bounds order the neighbours."""
    seconds, budget = candidates.seconds(layout), candidates.tried + MOST_TRIED
    # A layout that a bound rules out may still lead to a better one.
    if problem.memory_limit is None:
        seconds = min(seconds, 4 * problem.bound(layout))
    while candidates.tried < budget and not candidates.control.should_stop():
        near = sorted({*_moves(problem, layout)}, key=lambda other: (problem.bound(other), other))
        best = None
        for other in near:
            if candidates.tried >= budget or (best is not None and problem.bound(other) >= best[0]):
                break
            took = candidates.seconds(other)
            if took < seconds * (1 - ROUNDING) and (best is None or took < best[0]):
                best = took, other
        if best is None:
            # No neighbour is faster: move to one with a lower bound.
            lower = near[0] if near else layout
            is_lower = problem.bound(lower) < problem.bound(layout)
            if not is_lower or candidates.seconds(lower) < float("inf"):
                return
            best = seconds, lower
        seconds, layout = best


def _moves(problem: StyleProblem, layout: Layout) -> Iterator[Layout]:
    """Yield layouts that differ in one decision, or in two decisions about devices."""
    blocks = layout.blocks
    for at, block in enumerate(blocks):
        others = (*blocks[:at], *blocks[at + 1 :])
        for other in _changed(problem, layout.microbatches, block):
            yield from _with(problem, layout, (*others, other))
            for shrunk in range(len(others)):  # block that gives up devices
                less = _smaller(others[shrunk])
                kept = (*others[:shrunk], *others[shrunk + 1 :])
                yield from (
                    wider for small in less
                    for wider in _with(problem, layout, (*kept, other, small))
                )
        for place, partner in enumerate(others):
            kept = (*others[:place], *others[place + 1 :])
            for merged in _merged(problem, layout.microbatches, block, partner):
                yield from _with(problem, layout, (*kept, merged))
        for guest in block.guests:  # move the guest to a separate device
            left = tuple(other for other in block.guests if other is not guest)
            alone = Block((guest.module,), 1, 1)
            for main in (block, *_smaller(block)):
                yield from _with(problem, layout, (*others, main._replace(guests=left), alone))
        if len(block.modules) > 1:
            for module in block.modules:
                left = tuple(m for m in block.modules if m != module)
                for copies in {block.copies, max(1, block.copies // 2)}:
                    parts = (Block((module,), 1, max(1, copies // 2)), Block(left, 1, copies))
                    yield from _with(problem, layout, (*others, *parts))
                    parts = (Block((module,), 1, 1), Block(left, 1, max(1, copies // 2)))
                    yield from _with(problem, layout, (*others, *parts))
    for count in problem.profiles:
        if count != layout.microbatches:
            yield from _with(problem, layout._replace(microbatches=count), blocks)


def _with(
    problem: StyleProblem, layout: Layout, blocks: Sequence[Block]
) -> Iterator[Layout]:
    order = {module: n for n, module in enumerate(problem.graph.topological)}
    ordered = tuple(sorted(blocks, key=lambda block: order[block.modules[0]]))
    other = layout._replace(blocks=ordered)
    if problem.allowed(other):
        yield other


def _changed(problem: StyleProblem, count: int, block: Block) -> Iterator[Block]:
    yield block._replace(copies=block.copies * 2)
    for guest in block.guests:
        kept = tuple(other for other in block.guests if other is not guest)
        places = {(guest.first, guest.copies * 2), (guest.first, guest.copies // 2 or 1)}
        places |= {(guest.first + by, guest.copies) for by in (-guest.copies, guest.copies)}
        for first, copies in sorted(places):
            yield block._replace(guests=(*kept, Guest(guest.module, first, copies)))
    if len(block.modules) == 1:
        yield block._replace(stages=block.stages + 1)
        yield block._replace(stages=block.stages * 2)
        if block.stages % 2 == 0:
            yield block._replace(stages=block.stages // 2, copies=block.copies * 2)
        if block.copies > 1:
            yield block._replace(stages=block.stages * 2, copies=block.copies // 2)
    for quotas in quota_choices(problem, count, block.modules, block.copies):
        if quotas != block.quotas:
            yield block._replace(quotas=quotas)


def _smaller(block: Block) -> list[Block]:
    less = [block._replace(stages=block.stages - 1)] if block.stages > 1 else []
    return [*less, block._replace(copies=block.copies // 2)] if block.copies > 1 else less


def _merged(problem: StyleProblem, count: int, block: Block, other: Block) -> Iterator[Block]:
    order = {module: n for n, module in enumerate(problem.graph.topological)}
    devices = block.devices + other.devices
    if len(block.modules) == 1:
        yield from _visits(block, other)
    if block.guests or other.guests:
        return
    modules = tuple(sorted((*block.modules, *other.modules), key=order.__getitem__))
    most = 1 << (devices.bit_length() - 1)
    for copies in {most, max(1, most // 2)}:
        for quotas in quota_choices(problem, count, modules, copies)[:2]:
            yield Block(modules, 1, copies, quotas)


def _visits(main: Block, other: Block) -> Iterator[Block]:
    """Yield pipelines that have the modules of another block as guests, on the pipeline's devices
    or on the devices of both blocks."""
    for stages in sorted({main.stages, main.stages + other.devices // main.copies}):
        wide = main._replace(stages=stages)
        copies = 1
        while copies <= wide.devices:
            for first in sorted({0, wide.devices - copies}):
                yield wide._replace(guests=(
                    *main.guests, *other.guests,
                    *(Guest(module, first, copies) for module in other.modules),
                ))
            copies *= 2
