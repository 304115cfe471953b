"""Exact compiled search for placements of modules on GPUs that finish before a deadline.

GPUs with the same modules form a *class* and are interchangeable. Modules are placed one after
another: the search chooses an option (degree and quota) and how many GPUs of every class get a
replica, which splits classes. Classes are not aligned, so a module may use any set of GPUs.

Pruning has to consider that eq. 8 is not monotone (its product decreases when a third module joins
a GPU). The modules on a GPU either stay as they are, with a known delay, or another module joins,
and the delay is at least the additive term with the smallest bandwidth that can join. A branch ends
if neither is in time. GPUs that no module may join count as full when free quota is compared with
the least needs of the other modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numba import njit

from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.multiplex.mapping import Placement
from raymm.scheduler.multiplex.problem import bits

PLACEMENT_OPTION = np.dtype([
    ("degree", np.int64),  # 0 ends the options of a module
    ("quota", np.int64),
    ("use", np.float64),  # share of the bandwidth
    ("cap", np.float64),  # largest delay (exclusive)
    ("memory", np.int64),  # bytes on each GPU
    ("area", np.int64),  # least quota steps taken from the pool
], align=True)


@njit(cache=True)
def placement_options(inputs, before):
    """Return the (K, O) :data:`PLACEMENT_OPTION` of every module that may finish before ``before``
    seconds, smallest area first; each row ends with degree 0. An option takes whole GPUs from the
    pool if no other module could join in time."""
    seconds, memory, bandwidth, entry, pool = inputs
    law, steps = pool.law, pool.steps
    modules, degrees, _ = seconds.shape
    options = np.zeros((modules, degrees * steps + 1), PLACEMENT_OPTION)
    monotone = law.additive >= 0.0 and law.product >= 0.0
    # Upper bound of any delay: everything on one GPU.
    worst = 0.0
    if monotone:
        peers = modules if law.own else 1
        worst = max(0.0, law.constant + law.additive * modules + law.product * peers)
    for m in range(modules):
        count = 0
        for j in range(degrees):
            first = count
            for q in range(1, steps + 1):
                alone = seconds[m, j, q]
                if not alone < before or memory[m, j] > pool.memory:
                    continue
                slack = before / alone - 1.0 if law.relative else before - alone
                if monotone:
                    # An option is dominated by one on as many GPUs with less quota, less bandwidth
                    # and as much slack (or more than any delay).
                    dominated = False
                    enough = min(slack, worst + 1e-9)
                    for o in range(first, count):
                        if options[m, o].use <= bandwidth[m, q] and options[m, o].cap >= enough:
                            dominated = True
                    if dominated:
                        continue
                option = options[m, count]
                option.degree, option.quota = 1 << j, q
                option.use, option.cap = bandwidth[m, q], slack
                option.memory = memory[m, j]
                shared = q < steps and entry[m, j, q] < before
                option.area = (1 << j) * (q if shared else steps)
                count += 1
        _sort_by_area(options[m], count)
    return options


@njit(cache=True)
def _sort_by_area(options, count):
    """Sort options stably by area; the place after the last one is scratch space."""
    for a in range(1, count):
        b = a
        options[count] = options[a]
        while b > 0 and options[count].area < options[b - 1].area:
            options[b] = options[b - 1]
            b -= 1
        options[b] = options[count]
    options[count].degree = 0


SOLVED, IMPOSSIBLE, GAVE_UP = 1, 0, -1

# Modules are placed level by level. Row ``level`` of the classes is the state before the module at
# that level is placed; its decisions write row ``level + 1``.
CLASS = np.dtype([
    ("gpus", np.int64),
    ("members", np.int64),  # levels of the modules on them, as bits
    ("quota", np.int64),  # steps in use
    ("memory", np.int64),  # bytes in use
    ("opened", np.bool_),  # True if another module may join
    ("order", np.int64),  # at place a: the class that is tried as number a
    ("taken", np.int64),  # at place a: GPUs of that class that get a replica
    ("left", np.int64),  # at place a: replicas that were still to be placed
    ("written", np.int64),  # at place a: number of classes of the next row at that time
], align=True)
LEVEL = np.dtype([
    ("classes", np.int64),  # number of classes
    ("decided", np.int64),  # number of classes that the replicas reached
    ("option", np.int64),  # chosen option, with its bandwidth and largest delay
    ("use", np.float64),
    ("cap", np.float64),
    ("need", np.int64),  # least quota steps of the modules from this level on
    ("least_use", np.float64),  # least bandwidth of one of these modules
    ("most_use", np.float64),  # largest bandwidth of all of them
], align=True)


@njit(cache=True)
def nothing_placed(modules, gpus):
    """Return a :class:`Packed` of GPUs without modules."""
    return Packed(np.zeros((modules, 2), np.int64), np.array([gpus]), np.zeros(1, np.int64))


@njit(cache=True)
def _in_time(members, levels, more, later, law):
    """Return whether the members' delays are below their caps as is, and if another module joins
    (from level ``later`` on). The second result uses a lower bound of the delay, so it may be
    wrongly True but never wrongly False."""
    e1, e2, e3 = law.constant, law.additive, law.product
    least_use, most_use = levels[later].least_use, levels[later].most_use
    total, product, count = 0.0, 1.0, 0
    remaining = members
    level = 0
    while remaining:
        if remaining & 1:
            total += levels[level].use
            product *= levels[level].use
            count += 1
        remaining >>= 1
        level += 1
    as_is = True
    joined = more
    base = e1 + e2 * total
    grown = base + (e2 * least_use if e2 >= 0 else e2 * most_use)
    remaining = members
    level = 0
    while remaining:
        if remaining & 1:
            b, cap = levels[level].use, levels[level].cap
            if count > 1:
                coupled = b * (total - b) if law.own else product
                if not max(0.0, base + e3 * coupled) < cap:
                    as_is = False
            elif not cap > 0.0:
                as_is = False
            if joined:
                if law.own:
                    added = e3 * b * (total - b + (least_use if e3 >= 0 else most_use))
                else:
                    added = 0.0 if e3 >= 0 else e3 * product
                if not max(0.0, grown + added) < cap:
                    joined = False
        remaining >>= 1
        level += 1
    return as_is, joined


@njit(cache=True)
def _close_level(level, levels, classes, pool, spread):
    """Return True if the classes at ``level`` are still feasible. Mark the classes that modules may
    join, and order them: fullest first (best fit), or emptiest first (``spread``)."""
    unplaced = level < len(levels) - 1
    free = 0
    for t in range(levels[level].classes):
        gpu_class = classes[level, t]
        gpu_class.opened = True
        if gpu_class.members:
            as_is, joined = _in_time(
                gpu_class.members, levels, unplaced and gpu_class.quota < pool.steps, level,
                pool.law,
            )
            if not as_is and not joined:
                return False
            gpu_class.opened = joined
        if gpu_class.opened:
            free += gpu_class.gpus * (pool.steps - gpu_class.quota)
    if free < levels[level].need:
        return False
    for a in range(levels[level].classes):
        quota = classes[level, a].quota
        b = a
        while b > 0:
            previous = classes[level, b - 1].order
            previous_quota = classes[level, previous].quota
            if (quota >= previous_quota) if spread else (quota <= previous_quota):
                break
            classes[level, b].order = previous
            b -= 1
        classes[level, b].order = a
    return True


@njit(cache=True)
def _write(classes, level, written, of, gpus):
    new = classes[level + 1, written]
    new.gpus, new.members, new.quota, new.memory = gpus, of.members, of.quota, of.memory


@njit(cache=True)
def _write_rest(level, at, count, written, classes):
    """Copy the classes tried from place ``at`` on to the next row; return its number of classes."""
    for a in range(at, count):
        gpu_class = classes[level, classes[level, a].order]
        _write(classes, level, written, gpu_class, gpu_class.gpus)
        written += 1
    return written


@njit(cache=True)
def _gpus_from(level, at, count, classes):
    gpus = 0
    for a in range(at, count):
        gpus += classes[level, classes[level, a].order].gpus
    return gpus


@njit(cache=True)
def _split_class(level, place, option, classes):
    """Add a replica to some GPUs of a class; return the number of classes of the next row."""
    gpu_class, chosen, written = classes[level, place.order], place.taken, place.written
    if chosen:
        _write(classes, level, written, gpu_class, chosen)
        new = classes[level + 1, written]
        new.members |= 1 << level
        new.quota += option.quota
        new.memory += option.memory
        written += 1
    if chosen < gpu_class.gpus:
        _write(classes, level, written, gpu_class, gpu_class.gpus - chosen)
        written += 1
    return written


@njit(cache=True)
def _may_join(level, of, option, levels, pool):
    """Return True if a replica of the module at ``level`` can join a class."""
    quota = of.quota + option.quota
    if not of.opened or quota > pool.steps or of.memory + option.memory > pool.memory:
        return False
    as_is, joined = _in_time(
        of.members | (1 << level), levels, level + 2 < len(levels) and quota < pool.steps,
        level + 1, pool.law,
    )
    return as_is or joined


@njit(cache=True)
def _search(first, levels, classes, options, pool, spread, node_limit):
    """Search depth first over options and numbers of replicas per class. Modules below level
    ``first`` stay as in row ``first``. Return the outcome as in :func:`pack`, and nodes."""
    modules = len(levels) - 1
    nodes, level, position, replicas_left, written = 0, first, 0, 0, 0
    levels[first].option = -1
    if not _close_level(first, levels, classes, pool, spread):
        return IMPOSSIBLE, nodes
    next_option, backtrack = True, False
    while True:
        now = levels[level]
        if next_option:
            next_option = False
            now.option += 1
            option = options[level, now.option]
            if option.degree == 0:
                level -= 1
                if level < first:
                    return IMPOSSIBLE, nodes
                now = levels[level]
                backtrack = True
            else:
                now.use, now.cap = option.use, option.cap
                position, replicas_left, written = 0, option.degree, 0
        if backtrack:
            backtrack = False
            position = now.decided - 1
            while position >= 0 and classes[level, position].taken == 0:
                position -= 1
            if position < 0:
                next_option = True
                continue
            classes[level, position].taken -= 1
        elif replicas_left == 0:
            # All replicas are placed; the remaining classes stay the same.
            now.decided = position
            levels[level + 1].classes = _write_rest(level, position, now.classes, written, classes)
            if not _close_level(level + 1, levels, classes, pool, spread):
                backtrack = True
                continue
            level += 1
            if level == modules:
                return SOLVED, nodes
            levels[level].option = -1
            next_option = True
            continue
        else:
            nodes += 1
            if nodes > node_limit:
                return GAVE_UP, nodes
            if _gpus_from(level, position, now.classes, classes) < replicas_left:
                now.decided = position
                backtrack = True
                continue
            entry = classes[level, position]
            gpu_class = classes[level, entry.order]
            joins = _may_join(level, gpu_class, options[level, now.option], levels, pool)
            entry.taken = min(gpu_class.gpus, replicas_left) if joins else 0
            entry.left, entry.written = replicas_left, written
        entry = classes[level, position]
        replicas_left = entry.left - entry.taken
        written = _split_class(level, entry, options[level, now.option], classes)
        position += 1


@njit(cache=True)
def _needs_of_later(levels, options, first):
    modules = len(levels) - 1
    for level in range(modules - 1, first - 1, -1):
        now, following = levels[level], levels[level + 1]
        least = following.least_use if level < modules - 1 else np.inf
        most, o = 0.0, 0
        while options[level, o].degree:
            least = min(least, options[level, o].use)
            most = max(most, options[level, o].use)
            o += 1
        now.need = following.need + options[level, 0].area
        now.least_use, now.most_use = least, following.most_use + most


@njit(cache=True)
def _put_kept(kept, order, first, inputs, before, levels, classes):
    """Place the kept modules, at levels below ``first``; return False if one is not in time
    alone."""
    levels[first].classes = len(kept.gpus)
    for t in range(len(kept.gpus)):
        classes[first, t].gpus = kept.gpus[t]
    for level in range(first):
        m = order[level]
        degree, quota = kept.chosen[m, 0], kept.chosen[m, 1]
        j = 0
        while 1 << j < degree:
            j += 1
        alone = inputs.seconds[m, j, quota]
        if not alone < before:
            return False
        levels[level].use = inputs.bandwidth[m, quota]
        levels[level].cap = before / alone - 1.0 if inputs.pool.law.relative else before - alone
        for t in range(len(kept.gpus)):
            if kept.content[t] >> m & 1:
                gpu_class = classes[first, t]
                gpu_class.members |= 1 << level
                gpu_class.quota += quota
                gpu_class.memory += inputs.memory[m, j]
    return True


@njit(cache=True)
def pack(inputs, before, spread, weights, kept, node_limit):
    """Find options and GPUs for modules such that each finishes before ``before`` seconds.

    Args:
        spread: True to fill emptier GPUs first.
        weights: (K,) factors of the modules' least needs; modules are placed in descending order of
            the product.
        kept: a :class:`Packed` with the modules that stay where they are.
        node_limit: largest number of placements to try.

    Returns:
        SOLVED, IMPOSSIBLE (proven, given the kept modules) or GAVE_UP; nodes used; and the
        :class:`Packed` of all modules, empty unless SOLVED.
    """
    modules, pool = inputs.seconds.shape[0], inputs.pool
    options = placement_options(inputs, before)
    none = np.zeros(0, np.int64)
    nothing = Packed(np.zeros((modules, 2), np.int64), none, none)
    keys = np.empty(modules)
    area, first = 0, 0
    for m in range(modules):
        if not options[m, 0].degree:
            return IMPOSSIBLE, 0, nothing
        area += options[m, 0].area
        keys[m] = -(options[m, 0].area * weights[m])
        if kept.chosen[m, 0] > 0:
            keys[m] = -np.inf
            first += 1
    if area > pool.gpus * pool.steps or first == modules:
        return IMPOSSIBLE, 0, nothing
    # Kept modules come first, then those that need most.
    order = np.argsort(keys, kind="mergesort")
    options = options[order]
    levels = np.zeros(modules + 1, LEVEL)
    classes = np.zeros((modules + 1, pool.gpus + 1), CLASS)
    if not _put_kept(kept, order, first, inputs, before, levels, classes):
        return IMPOSSIBLE, 0, nothing
    _needs_of_later(levels, options, first)
    result, nodes = _search(first, levels, classes, options, pool, spread, node_limit)
    if result != SOLVED:
        return result, nodes, nothing
    # numba knows the fields of a record, pyright does not.
    count = levels[modules].classes  # pyright: ignore[reportAttributeAccessIssue]
    chosen = np.zeros((modules, 2), np.int64)
    gpus, content = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for t in range(count):
        gpus[t] = classes[modules, t].gpus
    for level in range(modules):
        m = order[level]
        if level < first:
            chosen[m] = kept.chosen[m]
        else:
            option = options[level, levels[level].option]
            chosen[m, 0], chosen[m, 1] = option.degree, option.quota
        for t in range(count):
            if classes[modules, t].members >> level & 1:
                content[t] |= 1 << m
    return result, nodes, Packed(chosen, gpus, content)


class InterferenceLaw(NamedTuple):
    """Eq. 8 for compiled code.

    Attributes:
        constant, additive, product: e1, e2, e3, float64.
        own: True if e3 multiplies a module's bandwidth with the sum of the others, not the product.
        relative: True if a delay is a fraction of the module's seconds alone.
    """

    constant: float
    additive: float
    product: float
    own: bool
    relative: bool

    @classmethod
    def of(cls, model: Interference) -> InterferenceLaw:
        return cls(
            float(model.constant), float(model.additive), float(model.product),
            model.coupling == "own", model.unit == "relative",
        )


class Pool(NamedTuple):
    """GPUs that a stage's modules share; ``steps`` and ``memory`` (bytes) are per GPU."""

    gpus: int
    steps: int
    memory: int
    law: InterferenceLaw


class StageInputs(NamedTuple):
    """Input of a search for placements of a stage's K modules.

    Attributes:
        seconds: (K, J, steps + 1) seconds alone, by log2 of the degree and quota.
        memory: (K, J) int64, bytes on each GPU.
        bandwidth: (K, steps + 1) share of the bandwidth.
        entry: (K, J, steps + 1) lower bounds of seconds next to any other module.
    """

    seconds: np.ndarray
    memory: np.ndarray
    bandwidth: np.ndarray
    entry: np.ndarray
    pool: Pool


class Packed(NamedTuple):
    """Modules on GPUs; GPUs with the same modules are one class.

    Attributes:
        chosen: (K, 2) int64, degree and quota of each module; 0 for modules that are not placed.
        gpus: (C,) int64, number of GPUs of each class.
        content: (C,) int64, modules on them, as bits.
    """

    chosen: np.ndarray
    gpus: np.ndarray
    content: np.ndarray


@dataclass(frozen=True, eq=False)
class StagePacking:
    """Named modules on GPUs; ``packed`` has them in the order of ``modules``."""

    modules: tuple[str, ...]
    packed: Packed

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """Placements with numbered GPUs; classes with most modules come first."""
        sets: list[list[int]] = [[] for _ in self.modules]
        _, gpus, content = self.packed
        first = 0
        order = sorted(
            range(len(gpus)), key=lambda c: (-int(content[c]).bit_count(), c)
        )
        for c in order:
            for local in bits(int(content[c])):
                sets[local].extend(range(first, first + int(gpus[c])))
            first += int(gpus[c])
        return tuple(
            Placement(name, tuple(replica_gpus), int(quota))
            for name, replica_gpus, quota in zip(
                self.modules, sets, self.packed.chosen[:, 1], strict=True
            )
        )

    @classmethod
    def of(
        cls, modules: Sequence[str], placements: Sequence[Placement], gpus: int
    ) -> StagePacking:
        """Return the packing of placements, one of each module in ``modules``, on ``gpus`` GPUs
        including unused ones."""
        index = {name: i for i, name in enumerate(modules)}
        chosen = np.zeros((len(modules), 2), np.int64)
        content = [0] * gpus
        for placement in placements:
            chosen[index[placement.module]] = len(placement.gpus), placement.quota
            for g in placement.gpus:
                content[g] |= 1 << index[placement.module]
        classes = Counter(content)
        packed = Packed(chosen, np.array(list(classes.values())), np.array(list(classes)))
        return cls(tuple(modules), packed)
