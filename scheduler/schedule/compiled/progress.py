"""State of a list schedule: the possible next tasks of a stage, when they are ready, and whether
there is memory for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from raymm.scheduler.schedule.compiled.arrays import (
    ACTIVATION,
    BACKWARDS,
    CONSUMER,
    CONSUMER_EDGE,
    CONSUMERS,
    DEPTH,
    FORWARDS,
    HELD,
    KEPT,
    NEEDS,
    PRODUCER,
    PRODUCERS,
    RANK,
    RECOMPUTES,
    RUN,
)
from raymm.scheduler.schedule.compiled.machine_code import allocating_part, part

# Number of microbatches that a stage without backward may be ahead of its consumer. Such a stage
# keeps no activations, only outputs that wait to be received; two hide the jitter between ranks.
# The limit matters on ranks that have other work.
RUN_AHEAD = 2

FORWARD, RECOMPUTE, BACKWARD, WEIGHT = range(4)


# Columns of a stage's counts, and the task ends stored per stage and microbatch.
STARTED, NEXT_FORWARD, NEXT_RECOMPUTE, NEXT_BACKWARD, FIRST_WEIGHT, LAST_WEIGHT = range(6)
FORWARD_END, RECOMPUTED_END, BACKWARD_END = range(3)


class Progress(NamedTuple):
    """Progress of the stages. Each stage takes its microbatches in ascending order in every kind of
    task, so that messages of an edge stay in order.

    Attributes:
        counts: (S, 6) int64: forwards started that need a backward; the next task of each kind;
            first and one past the last microbatch whose B_d is done and B_w is not.
        weights: those microbatches, per stage.
        ends: (3, S, M) seconds at the end of a forward, recomputation and backward; inf before.
        consumed: (S, modules) forwards of consumers.
        on_quota: (S, M) bool, True if the activations were computed on the quota.
        held, rank_held: (S, M) and (R,) bytes.
        log: (tasks, 4) stage, microbatch, operation, group.
        length: (1,) used length of the log.
        options, option_ready: stage, kind and microbatch of the tasks that the current rank could
            run, and when they are ready.
        begun, begun_seconds: the same of tasks that began together, and seconds on a whole device.
        phase: (R,) current phase of each rank.
        waiting: (R, phases) number of tasks that have not begun.
        free_at: (R,) seconds at the end of the current task.
        event_times, event_ranks: binary heap of the times when ranks choose again.
        num_events: (1,) used length of the heap.
    """

    counts: np.ndarray
    weights: np.ndarray
    ends: np.ndarray
    consumed: np.ndarray
    on_quota: np.ndarray
    held: np.ndarray
    rank_held: np.ndarray
    log: np.ndarray
    length: np.ndarray
    options: np.ndarray
    option_ready: np.ndarray
    begun: np.ndarray
    begun_seconds: np.ndarray
    phase: np.ndarray
    waiting: np.ndarray
    free_at: np.ndarray
    event_times: np.ndarray
    event_ranks: np.ndarray
    num_events: np.ndarray


@allocating_part
def nothing_done(step, rules):
    """Return the progress of a step before its first task."""
    stages, microbatches = step.uses.shape
    tasks, ranks = len(step.microbatches), len(step.rank_starts) - 1
    most = 0
    for rank in range(ranks):
        most = max(most, step.rank_starts[rank + 1] - step.rank_starts[rank])
    # A task has an event for its rank, a forward for its consumers and producers, a backward for
    # its producers.
    events = ranks + 3 * (tasks + len(step.edges) * microbatches)
    return Progress(
        np.zeros((stages, 6), np.int64), np.zeros(tasks, np.int64),
        np.full((3, stages, microbatches), np.inf),
        np.zeros(step.consumer_modules.shape, np.int64),
        np.zeros((stages, microbatches), np.bool_), np.zeros((stages, microbatches)),
        np.zeros(ranks), np.empty((3 * tasks, 4), np.int64), np.zeros(1, np.int64),
        np.empty((4 * most, 3), np.int64), np.empty(4 * most), np.empty((most, 3), np.int64),
        np.empty(most), np.zeros(ranks, np.int64), _tasks_by_phase(step, rules, ranks),
        np.zeros(ranks), np.empty(events), np.empty(events, np.int64), np.zeros(1, np.int64),
    )


@allocating_part
def _tasks_by_phase(step, rules, ranks):
    """Return (R, phases) numbers of forwards and backwards; (R, 0) without phases."""
    if rules.phases.size == 0:
        return np.zeros((ranks, 0), np.int64)
    result = np.zeros((ranks, rules.phases.max() + 1), np.int64)
    for stage in range(step.uses.shape[0]):
        rank = step.stages[stage, RANK]
        for microbatch in range(step.uses.shape[1]):
            if step.uses[stage, microbatch] & RUN:
                result[rank, rules.phases[0, stage, microbatch]] += 1
            if step.uses[stage, microbatch] & NEEDS:
                result[rank, rules.phases[1, stage, microbatch]] += 1
    return result


@part
def wake_at(progress, time, rank):
    """Let a rank choose again at a time, unless it is busy until later."""
    if progress.free_at[rank] > time:
        return
    times, ranks = progress.event_times, progress.event_ranks
    place = progress.num_events[0]
    progress.num_events[0] += 1
    while place > 0:
        above = (place - 1) >> 1
        if times[above] < time or (times[above] == time and ranks[above] <= rank):
            break
        times[place], ranks[place] = times[above], ranks[above]
        place = above
    times[place], ranks[place] = time, rank


@part
def next_event(progress):
    """Remove the earliest event, of equal ones that of the lowest rank; return time and rank."""
    times, ranks = progress.event_times, progress.event_ranks
    now, first = times[0], ranks[0]
    progress.num_events[0] -= 1
    count, place = progress.num_events[0], 0
    time, rank = times[count], ranks[count]
    while 2 * place + 1 < count:
        below, other = 2 * place + 1, 2 * place + 2
        if other < count and (
            times[other] < times[below]
            or (times[other] == times[below] and ranks[other] < ranks[below])
        ):
            below = other
        if time < times[below] or (time == times[below] and rank <= ranks[below]):
            break
        times[place], ranks[place] = times[below], ranks[below]
        place = below
    times[place], ranks[place] = time, rank
    return now, first


@part
def is_next(progress, time, rank):
    return progress.event_times[0] == time and progress.event_ranks[0] == rank


@part
def in_phase(rules, progress, rank, stage, kind, microbatch):
    """Return True if all tasks of the rank in earlier phases have begun."""
    if rules.phases.size == 0 or kind == WEIGHT:
        return True
    current = progress.phase[rank]
    while current + 1 < progress.waiting.shape[1] and progress.waiting[rank, current] == 0:
        current += 1
    progress.phase[rank] = current
    return rules.phases[0 if kind == FORWARD else 1, stage, microbatch] <= current


@part
def next_task(step, rules, progress, stage, kind):
    """Return the next microbatch of a kind of task of a stage, or -1, and the time when it is
    ready. ``kind`` is one of ``FORWARD``, ``RECOMPUTE``, ``BACKWARD`` and ``WEIGHT``."""
    first = step.stages[stage, BACKWARDS]
    backwards = step.stages[stage + 1, BACKWARDS] - first
    forwards = step.stages[stage + 1, FORWARDS] - step.stages[stage, FORWARDS]
    early = rules.early and step.stages[stage, RECOMPUTES] > 0
    microbatch, ready = -1, np.inf
    if kind == FORWARD:
        if progress.counts[stage, NEXT_FORWARD] < forwards:
            index = step.stages[stage, FORWARDS] + progress.counts[stage, NEXT_FORWARD]
            microbatch = step.microbatches[index]
            ready = _forward_ready(step, progress, stage, microbatch)
            if not _may_run_ahead(step, rules, progress, stage, microbatch):
                microbatch = -1
    elif kind == RECOMPUTE:
        if early and progress.counts[stage, NEXT_RECOMPUTE] < backwards:
            microbatch = step.microbatches[first + progress.counts[stage, NEXT_RECOMPUTE]]
            ready = progress.ends[FORWARD_END, stage, microbatch]
            if ready < np.inf and not _gradient_is_near(
                step, progress, stage, microbatch, rules.hops
            ):
                microbatch = -1
    elif kind == BACKWARD:
        held_back = rules.flush and progress.counts[stage, NEXT_FORWARD] < forwards
        if progress.counts[stage, NEXT_BACKWARD] < backwards and not held_back:
            microbatch = step.microbatches[first + progress.counts[stage, NEXT_BACKWARD]]
            ready = _backward_ready(step, progress, stage, microbatch, early)
    elif progress.counts[stage, FIRST_WEIGHT] < progress.counts[stage, LAST_WEIGHT]:
        microbatch = progress.weights[first + progress.counts[stage, FIRST_WEIGHT]]
        # Infinite if the backward is in the group that begins just now.
        return microbatch, progress.ends[BACKWARD_END, stage, microbatch]
    return (microbatch, ready) if ready < np.inf else (-1, ready)


@part
def _forward_ready(step, progress, stage, microbatch):
    """Return when all inputs of a forward are present; ``inf`` if that is open."""
    ready = 0.0
    for edge in range(step.stages[stage, PRODUCERS], step.stages[stage + 1, PRODUCERS]):
        producer = step.edges[edge, PRODUCER]
        if step.uses[producer, microbatch] & RUN:
            end = progress.ends[FORWARD_END, producer, microbatch]
            ready = max(ready, end + step.delays[edge, 0])
    return ready


@part
def _backward_ready(step, progress, stage, microbatch, early):
    """Return when all inputs of a backward are present: gradients, and its forward's results (with
    ``early``, its recomputation's); ``inf`` if that is open."""
    if early:
        ready = progress.ends[RECOMPUTED_END, stage, microbatch]
    else:
        ready = progress.ends[FORWARD_END, stage, microbatch]
    for row in range(step.stages[stage, CONSUMERS], step.stages[stage + 1, CONSUMERS]):
        consumer = step.edges[row, CONSUMER]
        if step.uses[consumer, microbatch] & NEEDS:
            delay = step.delays[step.edges[row, CONSUMER_EDGE], 1]
            ready = max(ready, progress.ends[BACKWARD_END, consumer, microbatch] + delay)
    return ready


@part
def _gradient_is_near(step, progress, stage, microbatch, hops):
    """Return True if the gradient has left a stage at most ``hops`` edges downstream."""
    for _ in range(hops):
        start, stop = step.stages[stage, CONSUMERS], step.stages[stage + 1, CONSUMERS]
        if start == stop:
            return True
        for row in range(start, stop):
            if step.uses[step.edges[row, CONSUMER], microbatch] & NEEDS:
                stage = step.edges[row, CONSUMER]
                break
        if progress.ends[BACKWARD_END, stage, microbatch] < np.inf:
            return True
    last = step.stages[stage, CONSUMERS] == step.stages[stage + 1, CONSUMERS]
    return last and progress.ends[FORWARD_END, stage, microbatch] < np.inf


@part
def _may_run_ahead(step, rules, progress, stage, microbatch):
    if not step.uses[stage, microbatch] & NEEDS:
        if rules.phases.size > 0:
            return True
        rank = step.stages[stage, RANK]
        if step.rank_starts[rank + 1] - step.rank_starts[rank] == 1:
            return True
        least = progress.counts[stage, NEXT_FORWARD]
        for module in range(step.consumer_modules.shape[1]):
            if step.consumer_modules[stage, module]:
                least = min(least, progress.consumed[stage, module])
            elif not step.consumer_modules[stage].any():
                return True
        return progress.counts[stage, NEXT_FORWARD] - least < RUN_AHEAD
    if rules.flush:
        return True
    ahead = progress.counts[stage, STARTED] - progress.counts[stage, NEXT_BACKWARD]
    if rules.ahead[stage] > 0:
        return ahead < rules.ahead[stage]
    return ahead < step.stages[stage, HELD] or (rules.beyond_depth and len(rules.limits) > 0)


@part
def has_room(step, rules, progress, stage, kind, microbatch):
    """Return True if a task leaves its rank enough memory for the tasks that must come first. A
    rank can always finish its microbatches oldest first (within a microbatch, stages nearer to the
    loss first) if each of them fits once all before it are finished. A task may start if this
    invariant stays true. Otherwise a rank could fill its memory with early tasks and deadlock."""
    if len(rules.limits) == 0 or kind == BACKWARD or kind == WEIGHT:
        return True
    if kind == FORWARD and not step.uses[stage, microbatch] & NEEDS:
        return True
    rank = step.stages[stage, RANK]
    # The tolerance absorbs rounding in sums of many sizes, so that a limit can be met exactly.
    limit = rules.limits[rank] * (1 + 1e-12)
    added = step.amounts[stage, KEPT] if kind == FORWARD else step.amounts[stage, ACTIVATION]
    added *= step.loads[stage, microbatch]
    if progress.rank_held[rank] + added > limit:
        return False
    task = (microbatch, step.stages[stage, DEPTH], stage)
    first_at, last_at = step.rank_starts[rank], step.rank_starts[rank + 1]
    for row in range(first_at, last_at):
        earlier = step.rank_stages[row]
        # the next task of the stage that needs memory
        recomputes = step.stages[earlier, RECOMPUTES] > 0
        index = progress.counts[earlier, NEXT_RECOMPUTE if recomputes else STARTED]
        index += step.stages[earlier, BACKWARDS]
        if index == step.stages[earlier + 1, BACKWARDS]:
            continue
        first = step.microbatches[index]
        candidate = (first, step.stages[earlier, DEPTH], earlier)
        if candidate > task or (candidate == task and kind == RECOMPUTE):
            continue
        held = 0.0
        for late_at in range(first_at, last_at):
            late = step.rank_stages[late_at]
            held += _held_from(step, progress, late, first, candidate)
            key = (first, step.stages[late, DEPTH], late)
            # a forward that must still come before it
            if key >= candidate and key != task and step.uses[late, first] & NEEDS:
                if progress.ends[FORWARD_END, late, first] == np.inf:
                    most = _largest_load(step, late, first, microbatch)
                    held += step.amounts[late, KEPT] * most
        most = _largest_load(step, earlier, first, microbatch)
        added_later = step.amounts[earlier, ACTIVATION] * most
        if held + added + added_later > limit:
            return False
    return True


@part
def _largest_load(step, stage, first, last):
    """Return the largest load of a stage on the microbatches ``first`` to ``last``, which all have
    to fit one after another."""
    largest = 0.0
    for microbatch in range(first, last + 1):
        if step.uses[stage, microbatch] & NEEDS:
            largest = max(largest, step.loads[stage, microbatch])
    return largest


@part
def _held_from(step, progress, stage, first, place):
    """Return the bytes of a stage's microbatches at or after a place in the finishing order."""
    start = step.stages[stage, BACKWARDS]
    stop = start + progress.counts[stage, STARTED]
    low, high = start, stop
    while low < high:
        middle = (low + high) // 2
        if step.microbatches[middle] < first:
            low = middle + 1
        else:
            high = middle
    total = 0.0
    for index in range(low, stop):
        microbatch = step.microbatches[index]
        if microbatch > first or (microbatch, step.stages[stage, DEPTH], stage) >= place:
            total += progress.held[stage, microbatch]
    return total
