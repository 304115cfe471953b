"""Planner: from a model's costs and a number of ranks to the plan to run.

The planner searches stage counts exactly under 1F1B
(:func:`~raymm.scheduler.search.stage_search.joint_search`). Then it tries the best of them with
better schedules and several chunks per rank, and the other layouts. All plans are compared by
simulated iteration time with messages, within the memory limit. If degrees may be searched, it then
looks for degrees of tensor, context and data parallelism with which pipelines are faster still
(:mod:`~raymm.scheduler.search.degree_search`). Modules that share ranks have the same degrees.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from raymm.errors import NoPlanError
from raymm.scheduler.costs.device_memory import (
    communicator_groups,
    idle_share,
    message_bytes,
    system_bytes,
    update_bytes,
)
from raymm.scheduler.costs.layer_costs import layer_work, trainable_before
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.progress.search_control import SearchControl
from raymm.scheduler.schedule.process_costs import stage_layers
from raymm.scheduler.schedules.registry import find_schedule
from raymm.scheduler.search.degree_search import are_few, estimates, search_degrees
from raymm.scheduler.search.evaluation import (
    Candidates,
    Option,
    Proposal,
    fastest_first,
    step_bound,
)
from raymm.scheduler.search.layouts import (
    chunked,
    colocated,
    encoders_into_backbone,
    replicated,
)
from raymm.scheduler.search.module_degrees import ALONE, DegreeChoices
from raymm.scheduler.search.options import LAYERS, RECOMPUTE, PlanProblem
from raymm.scheduler.search.partition import cost_matrix
from raymm.scheduler.search.stage_memory import (
    ModuleMemory,
    StageBytes,
    StageMemory,
    range_maximum,
)
from raymm.scheduler.search.stage_search import joint_search
from raymm.scheduler.search.stage_space import ROUNDING, StageSpace

# Name, next to layouts, of pipelines with replicas and ranks of several processes.
DEGREES = "degrees"
# Reasons not to list a layout's plans.
SLOWER = "it cannot beat the best plan so far"
SLOWER_OR_TOO_LARGE = "no plan that fits in memory can beat the best plan so far"
SHARED_LAYOUTS = ("colocated", "replicated")
# Number of plans with degrees to try with every schedule.
DEGREE_FINALISTS = 2
# Number of plans of the stage search, and of each layout that shares ranks, to try with every
# schedule.
FINALISTS = 3
# Up to this many combinations of windows of ranks with encoders, all are tried.
MOST_WINDOWS = 40
# On more ranks than this, the search ignores improvements below this fraction, and does not create
# plans that bounds rule out.
MANY_RANKS, GAP = 32, 0.005
# In that case, at most this many stages are created in plans (or their equal parts) per assignment
# of degrees.
MOST_STAGES = 10_000
Planner = Callable[[PlanProblem], Proposal]
Searched = frozenset[tuple[str, bool | str]]
# A plan that fills this fraction of a rank's memory may be limited by it.
TIGHT = 0.8
SHARED = "encoders share a rank"


def propose(
    problem: PlanProblem, control: SearchControl | None = None,
    searched: Collection[tuple[str, bool | str]] = (),
) -> Proposal:
    """Plan a model that has a rank for each module.

    Plans without degrees are evaluated even if degrees may be searched (unless 1 is not accepted),
    so degrees never make the result slower. The search over degrees is exact to within :data:`GAP`
    only if there are few plans (:func:`~raymm.scheduler.search.degree_search.are_few`).

    Args:
        control: reports progress and may end the search early.
        searched: searches to skip because they were done before (:attr:`Proposal.searched`).

    Raises:
        NoPlanError: no plan fits.
        PlanError: the profile does not match the graph.
    """
    profile, network, degrees = problem.profile, problem.network, problem.degrees
    if degrees and profile.links is None:
        profile = replace(profile, links=network.links)
    candidates = Candidates(network, problem.schedules, control)
    left = (*problem.layouts, DEGREES) if degrees else tuple(problem.layouts)
    if degrees and not all(choices.may_be_alone for choices in degrees.values()):
        left = (DEGREES,)
    done = set(searched)
    for again in RECOMPUTE if problem.recompute is None else (problem.recompute,):
        space = StageSpace(
            problem.graph, profile, problem.ranks, problem.num_microbatches,
            recompute=again is True, memory_limit=problem.memory_limit,
            by_part=problem.ranks > MANY_RANKS,
        )
        within = partial(within_memory, adaptive=again == LAYERS)
        # Partitions of layouts that share ranks do not adapt to memory, so these layouts would be
        # the same as without recomputation.
        same = SHARED_LAYOUTS if again == LAYERS else ()
        layouts = tuple(
            layout for layout in left
            if (layout, again) not in done and not (layout in same and (layout, False) in done)
        )
        same = tuple(layout for layout in left if layout in same and layout not in layouts)
        left = _Planner(space, within, candidates, layouts, problem.chunks, degrees).run() + same
        done |= {(layout, again) for layout in layouts}
        if not left or problem.memory_limit is None or candidates.control.should_stop():
            break
    return replace(candidates.proposal(), searched=frozenset(done))


class _Planner:
    """One round of planning, with one way of recomputation."""

    def __init__(
        self, space: StageSpace, within: Callable[[StageSpace], StageSpace], candidates: Candidates,
        layouts: Sequence[str], chunks: Sequence[int], degrees: Mapping[str, DegreeChoices],
    ) -> None:
        self.space = within(space)
        self.within = within
        self.candidates = candidates
        self.layouts = layouts
        self.chunks = chunks
        self.degrees = degrees

    def run(self) -> tuple[str, ...]:
        """Add the plans that are found; return the layouts without any plan that fits."""
        left = []
        for layout in self._ordered():
            before = len(self.candidates.options)
            if self.candidates.control.should_stop():
                break
            self.candidates.control.searching(layout + self._memory_text)
            if layout == "modality_parallel":
                self._try_modality_parallel()
            elif layout == DEGREES:
                self._try_degrees()
            else:
                self._try_shared(layout)
            if len(self.candidates.options) == before:
                left.append(layout)
        return tuple(left)

    @property
    def _memory_text(self) -> str:
        """Text for the recomputation of this round."""
        memory = self.space.memory
        layers = ", layers recomputing" if memory is not None and memory.adaptive else ""
        return ", recomputing" if self.space.recompute else layers

    def _ordered(self) -> Sequence[str]:
        """Return the layouts to search. On many ranks degrees come first, because bounds then
        mostly rule out the others."""
        if not self._many or DEGREES not in self.layouts:
            return self.layouts
        return (DEGREES, *(layout for layout in self.layouts if layout != DEGREES))

    @property
    def _many(self) -> bool:
        return self.space.ranks > MANY_RANKS

    @property
    def _incumbent(self) -> float:
        """Seconds of the best plan so far if degrees come first; else ``inf``, so that every layout
        has a plan."""
        options = self.candidates.options if self._many and self.degrees else []
        return min((option.seconds for option in options), default=math.inf)

    def _is_hopeless(self, space: StageSpace, incumbent: float) -> bool:
        """Return True if no plan of a space without degrees, or with equal degrees of all modules,
        can be faster than the incumbent, because it cannot use more ranks than there are layers."""
        degrees = space.shared(space.graph.backbone)
        works = layer_work(space.graph, space.process_profile).values()
        ranks = min(self.space.ranks // degrees.devices, sum(map(len, works)))
        work = sum(layer.total for layers in works for layer in layers)
        steps = space.num_microbatches // degrees.dp
        return steps * work / ranks * (1 - ROUNDING) >= incumbent

    def _try_modality_parallel(self) -> None:
        candidates = self.candidates
        if self._is_hopeless(self.space, self._incumbent):
            candidates.refused.append(("modality_parallel", SLOWER))
            return
        try:
            search = joint_search(
                self.space, candidates.seconds, candidates.bound, candidates.fits,
                alternatives=FINALISTS - 1, gap=GAP if self._many else ROUNDING,
                incumbent=self._incumbent, control=candidates.control,
            )
        except NoPlanError as error:  # other layouts may need less memory
            if not candidates.control.should_stop():
                reason = str(error) if self._incumbent == math.inf else SLOWER_OR_TOO_LARGE
                candidates.refused.append((f"modality_parallel{self._memory_text}", reason))
            return
        candidates.count(search)
        for choice in (search.best, *search.alternatives):
            candidates.add_schedules("modality_parallel", choice.plan)
        self._try_chunks(search.best.counts)

    def _try_chunks(self, counts: dict[str, int]) -> None:
        split = [s for s in self.candidates.schedules if find_schedule(s).splits_backward]
        if not split:
            return
        # Zero bubble is tuned without the bandwidth of links, so 1F1B may be faster.
        for many in self.chunks:
            if self.candidates.control.should_stop():
                return
            try:
                plan = chunked(self.space, counts, many)
            except NoPlanError:
                continue
            self.candidates.add_schedules(
                f"modality_parallel, {many} chunks per rank",
                replace(plan, schedule=split[0]),
            )

    def _try_degrees(self) -> None:
        """Search pipelines with degrees: with all schedules if there are few plans, else under 1F1B
        and then the best of them with every schedule."""
        candidates, space = self.candidates, self.space
        estimated = estimates(
            space, self.degrees, candidates.network.ranks_per_node,
            self._sharding, candidates.control,
        )
        if not self._many and are_few(space, estimated):
            results = search_degrees(
                replace(space, any_schedule=True), estimated,
                candidates.best_seconds, candidates.best_bound, candidates.any_fits, self.within,
                min((option.seconds for option in candidates.options), default=math.inf),
                searches=math.inf, per_backbone=math.inf, gap=GAP, control=candidates.control,
            )
            finalists = 1
        else:
            shared = [e for e in estimated if any(d != ALONE for d in e.degrees.values())]
            results = search_degrees(
                space, shared, candidates.seconds, candidates.bound, candidates.fits, self.within,
                # Compare with 1F1B only, because other schedules of a plan may be faster.
                min((o.seconds for o in candidates.options if o.plan.schedule == space.schedule),
                    default=math.inf),
                gap=GAP if self._many else ROUNDING,
                most_stages=MOST_STAGES if self._many else math.inf,
                control=candidates.control,
            )
            finalists = DEGREE_FINALISTS
        for result in results:
            candidates.count(result)
        for result in results[-finalists:]:
            candidates.add_schedules("modality_parallel", result.best.plan)

    def _try_shared(self, layout: str) -> None:
        """Try a layout in which modules share ranks, with all degrees that it may have: the
        fastest plans under 1F1B that fit, with every schedule. If none fits, add the most promising
        one, to report why it does not fit."""
        candidates = self.candidates
        plans, reason = [], f"it needs at least 2 ranks; ranks is {self.space.ranks}"
        for space in self._shared_spaces():
            if plans and candidates.control.stopped is not None:
                break
            options = candidates.options if space.degrees else []
            incumbent = min((option.seconds for option in options), default=self._incumbent)
            if self._is_hopeless(space, incumbent):
                reason = SLOWER
                continue
            for make in self._makers(layout, space):
                try:
                    plan = make()
                except NoPlanError as error:  # this variant does not exist for the model
                    reason = str(error)
                    continue
                if step_bound(plan, candidates.network) * (1 - ROUNDING) < incumbent:
                    plans.append(plan)
                else:
                    reason = SLOWER
        if not plans:
            candidates.refused.append((layout, reason))
            return
        bounded = sorted((candidates.bound(plan), at, plan) for at, plan in enumerate(plans))
        simulated: list[tuple[float, int, Plan]] = []
        for bound, at, plan in bounded:
            full = len(simulated) >= FINALISTS
            if full and bound * (1 - ROUNDING) >= simulated[FINALISTS - 1][0]:
                break
            if simulated and candidates.control.should_stop():
                break
            if candidates.fits(plan):
                simulated = sorted([*simulated, (candidates.seconds(plan), at, plan)])
        for _, _, plan in simulated[:FINALISTS] or bounded[:1]:
            candidates.add_schedules(layout, plan)

    def _shared_spaces(self) -> Iterator[StageSpace]:
        """Yield the space without degrees, then with those that all modules may have together:
        stages on a rank have the same processes, and replicas of all modules are equal parts."""
        yield self.space
        space, graph = self.space, self.space.graph
        if not self.degrees:
            return
        choices = {n.name: self.degrees.get(n.name, DegreeChoices()) for n in graph.nodes}
        for shared in choices[graph.backbone].within(
            space.ranks, self.candidates.network.ranks_per_node, space.num_microbatches,
            self._sharding,
        ):
            if shared.devices > 1 and all(
                shared.tp in some.tp and shared.cp in some.cp for some in choices.values()
            ):
                yield replace(
                    space, degrees=dict.fromkeys(choices, shared), by_part=True, memory=None,
                    ranks=max(space.ranks, shared.devices * len(choices)),  # modules share ranks
                )

    @property
    def _sharding(self) -> str:
        return "none" if self.space.memory_limit is None else "zero1"

    def _makers(self, layout: str, space: StageSpace) -> Iterator[Callable[[], Plan]]:
        graph = space.graph
        ranks = self.space.ranks // space.shared(graph.backbone).devices  # of an equal part
        most = graph.node(graph.backbone).num_layers  # most stages of the backbone
        try:
            encoders = encoders_into_backbone(graph)
        except NoPlanError:  # the layouts themselves raise it, too
            encoders = []
        if layout == "replicated":
            stages = min(ranks, most)
            for windows in _windows(stages, encoders) if encoders else [None]:
                yield partial(replicated, space, stages, windows)
            return
        longest = max((graph.node(name).num_layers for name in encoders), default=1)
        for first in range(1, min(longest, ranks - 1) + 1):
            yield partial(colocated, space, first, min(ranks - first, most))


def _windows(ranks: int, encoders: Sequence[str]) -> Iterator[dict[str, range]]:
    """Yield windows of ranks with replicas of each encoder: all combinations if they are few, else
    the first ranks for all encoders together."""
    every = [range(a, b) for a in range(ranks) for b in range(a + 1, ranks + 1)]
    if len(every) ** len(encoders) <= MOST_WINDOWS:
        for chosen in itertools.product(every, repeat=len(encoders)):
            yield dict(zip(encoders, chosen, strict=True))
        return
    for width in {ranks, *(1 << n for n in range(ranks.bit_length()))}:
        yield dict.fromkeys(encoders, range(min(width, ranks)))


def within_memory(space: StageSpace, adaptive: bool = False) -> StageSpace:
    """Return the space with a :class:`StageMemory`, if it has a memory limit. If ``adaptive``,
    layers may keep fewer activations where a stage would not fit otherwise."""
    if space.memory_limit is None:
        return space
    modules = {
        node.name: ModuleMemory(
            space.process_profile.modules[node.name], space.backward[node.name],
            stage_bytes(space, node.name), space.recomputing[node.name], adaptive,
        )
        for node in space.graph.nodes
    }
    microbatches = {name: space.replica_microbatches(name) for name in modules}
    return replace(space, memory=StageMemory(modules, microbatches, adaptive))


def stage_bytes(space: StageSpace, name: str) -> StageBytes:
    """Return the memory of a module's stages, each on a separate rank, as in
    :func:`raymm.scheduler.schedule.stage_costs.stage_costs`. The space must have a memory limit."""
    graph, node, degrees = space.graph, space.graph.node(name), space.shared(name)
    profile, layers = space.profile, space.process_profile.modules[name]
    sharers = degrees.dp * degrees.cp
    moments = sharers if degrees.sharding == "zero1" else 1
    flags = list(zip(layers, node.trainable, strict=True))
    trained = [c.trained_bytes if t else 0 for c, t in flags]
    whole = list(zip(stage_layers(layers, 0, len(layers)), node.trainable, strict=True))
    first = sum(profile.modules[p][-1].output_bytes for p in graph.producers(name))
    outputs = [c.output_bytes // degrees.cp for c in layers]
    received = np.array([first, *outputs], dtype=float)[:, None]
    if not graph.consumers(name):
        outputs[-1] = 0
    handed = np.array([0.0, *outputs])[None, :]
    # A stage has a backward if its last layer has one, and sends back a gradient if anything before
    # its first layer is trained.
    backward = np.array([False, *space.backward[name]])[None, :]
    before = np.array([*trainable_before(graph)[name], False])[:, None]
    kept = np.cumsum([0, *(
        c.activation_bytes if b else 0
        for c, b in zip(layers, space.backward[name], strict=True)
    )])
    # While a layer works in the backward, activations of later layers are already freed.
    reach = range_maximum([
        c.working_bytes + float(kept[i + 1]) if space.backward[name][i] else 0.0
        for i, c in enumerate(layers)
    ])
    forward = range_maximum([c.forward_bytes for c in layers]) + received
    data = cost_matrix([c.data_bytes for c in layers]) * space.replica_microbatches(name)
    messages = message_bytes(
        profile.device, space.replica_microbatches(name), received,
        handed * (space.recomputing[name] | ~backward), received * before, handed * backward,
    )
    links = 2 * max(2, len(graph.producers(name)) + len(graph.consumers(name)))
    groups = communicator_groups(degrees.of_rank, sharers)
    state = cost_matrix([profile.state_bytes(c, t, moments) for c, t in flags])
    state[0, -1] = sum(profile.state_bytes(c, t, moments) for c, t in whole)
    updated, largest = cost_matrix(trained), range_maximum(trained)
    updated[0, -1] = sum(c.trained_bytes for c, t in whole if t)
    largest[0, -1] = max((c.trained_bytes for c, t in whole if t), default=0)
    left = space.memory_limit - state - system_bytes(profile.device, links, groups)
    return StageBytes(
        room=left / (1 + idle_share(profile.device)),
        update=update_bytes(updated, largest, sharers, degrees.sharding),
        messages=messages + data + np.where(backward, 0.0, forward),
        received=np.broadcast_to(received, state.shape),
        saved=np.broadcast_to(handed * backward, state.shape),
        working=np.maximum(0.0, reach - kept[None, :]),
    )


def has_rank_each(problem: PlanProblem) -> bool:
    """Return True if there is a rank per module, which most planners require."""
    return problem.ranks >= len(problem.graph.nodes)


def find_plans(
    problem: PlanProblem, planner: Planner | None = None, control: SearchControl | None = None
) -> Proposal:
    """Plan a model with ``planner``, by default raymm's own, which reports its progress to
    ``control`` and may be ended early by it. Raise ``NoPlanError`` if no plan fits."""
    control = control or SearchControl()
    find = planner or partial(_own, control=control)
    try:
        proposal = find(problem)
    except NoPlanError:
        if problem.recompute is not None or planner is None and has_rank_each(problem):
            raise
        return find(replace(problem, recompute=True))
    # Also consider plans without degrees, so that degrees never hide a better plan.
    candidates = [proposal.best, *itertools.islice(filter(_is_pipelines, proposal.options), 1)]
    if problem.recompute is None and any(_is_tight(o, problem.memory_limit) for o in candidates):
        rest = planner or partial(_own, control=control, searched=proposal.searched)
        for again in (LAYERS, True):
            if control.should_stop():
                break
            with suppress(NoPlanError):
                proposal = _merged(proposal, rest(replace(problem, recompute=again)))
    return proposal


def space_of(problem: PlanProblem) -> StageSpace:
    """Return the space of stage counts for planners without degrees. With fewer ranks than modules,
    it has one rank per module."""
    return StageSpace(
        problem.graph, problem.profile, max(problem.ranks, len(problem.graph.nodes)),
        problem.num_microbatches, recompute=problem.recompute is True,
        memory_limit=problem.memory_limit,
    )


def _own(
    problem: PlanProblem, control: SearchControl, searched: Searched = frozenset()
) -> Proposal:
    """Run raymm's planner. With fewer ranks than modules, modules take turns on ranks."""
    if has_rank_each(problem):
        return propose(problem, control, searched)
    candidates = Candidates(problem.network, problem.schedules, control)
    control.searching("plans whose modules share ranks")
    for label, plan in time_shared_plans(space_of(problem), problem.ranks):
        if control.should_stop():
            break
        candidates.add_schedules(label, plan)
    return candidates.proposal()


def _is_tight(option: Option, limit: int | None) -> bool:
    if limit is None or any(stage.recompute for stage in option.plan.stages):
        return False
    return max(need.total for need in option.memory) > TIGHT * limit


def _is_pipelines(option: Option) -> bool:
    """Return True if the plan can be found without degrees."""
    plan = option.plan
    copies = any(stage.replica for stage in plan.stages)
    return plan.num_processes == plan.num_ranks and not (
        copies and option.layout == "modality_parallel"
    )


def _merged(first: Proposal, other: Proposal) -> Proposal:
    options = fastest_first((*first.options, *other.options))
    return Proposal(
        options, tuple(dict.fromkeys((*first.refused, *other.refused))),
        first.bound if options[0] is first.best else other.bound,
        first.combinations + other.combinations, first.simulated + other.simulated,
        first.searched | other.searched,
    )


def time_shared_plans(space: StageSpace, ranks: int) -> Iterator[tuple[str, Plan]]:
    """Yield (name, plan) of ways to put a model on fewer ranks than modules: everything on one
    rank; all other modules on the first rank and those after the language model on the last, with
    as much of the language model as balances the ranks; and the layouts that share ranks anyway.
    The ``ranks`` of the space, one per module, are ignored."""
    graph = space.graph
    after = {graph.backbone, *graph.followers}
    first = {node.name: range(1) for node in graph.nodes if node.name not in after}
    if ranks == 1:
        yield "everything on one rank", replicated(space, 1, first)
        return
    with suppress(NoPlanError):
        yield SHARED, replicated(space, ranks, first)
    for encoder_ranks in range(1, ranks):
        with suppress(NoPlanError):  # not every model has this layout
            yield "colocated", colocated(space, encoder_ranks, ranks - encoder_ranks)
    with suppress(NoPlanError):
        yield "replicated", replicated(space, ranks)
