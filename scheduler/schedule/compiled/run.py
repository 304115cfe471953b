"""Compiled inner loop of the list scheduler, which runs thousands of times in one search for a
plan. :mod:`raymm.scheduler.schedule.list_schedule` explains the rules."""

from __future__ import annotations

import numpy as np

from raymm.scheduler.schedule.compiled.arrays import (
    ACTIVATION,
    B_INPUT,
    B_WEIGHT,
    BACKWARDS,
    CONSUMER,
    CONSUMER_EDGE,
    CONSUMERS,
    DEPTH,
    F_CHECKPOINTED,
    F_NO_GRAD,
    FORWARDS,
    KEPT,
    MODULE,
    NEEDS,
    OWES,
    PRODUCER,
    PRODUCERS,
    QUOTA_SHARE,
    RANK,
    RECOMPUTES,
    RUN,
    TRAINS,
    B,
    F,
    R,
)
from raymm.scheduler.schedule.compiled.machine_code import allocating_part, entry, part
from raymm.scheduler.schedule.compiled.progress import (
    BACKWARD,
    BACKWARD_END,
    FIRST_WEIGHT,
    FORWARD,
    FORWARD_END,
    LAST_WEIGHT,
    NEXT_BACKWARD,
    NEXT_FORWARD,
    NEXT_RECOMPUTE,
    RECOMPUTE,
    RECOMPUTED_END,
    STARTED,
    WEIGHT,
    has_room,
    in_phase,
    is_next,
    next_event,
    next_task,
    nothing_done,
    wake_at,
)

# Operation whose seconds a postponed task takes, by kind.
OPERATION_OF = (F, R, B, B_WEIGHT)
ANY, WHOLE, QUOTA = range(3)  # where a task may run: anywhere, on the whole device, on its quota


@entry
def run_schedule(step, rules, until):
    """Schedule all tasks of a step. Return (tasks, 4) int64, stage, microbatch, operation and group
    of every task in the order in which tasks begin; the end of the last task; and (S,) the number
    of forwards and backwards of each stage that never began.

    A run whose program certainly ends after ``until`` seconds stops as soon as that is known, and
    then returns ``inf`` for the end. Only for rules without separate weight gradients and early
    recomputations, on ranks without quotas; ``inf`` for all other rules.
    """
    ranks = len(step.rank_starts) - 1
    progress = nothing_done(step, rules)
    remaining = _rank_seconds(step, until)
    on_time = until < np.inf  # True while every task began as soon as its program will begin it
    for rank in range(ranks):
        wake_at(progress, 0.0, rank)
    makespan, groups = 0.0, 0
    while progress.num_events[0] > 0:
        now, rank = next_event(progress)
        while progress.num_events[0] > 0 and is_next(progress, now, rank):
            next_event(progress)
        if progress.free_at[rank] > now:
            continue
        stage, kind = _choose(step, rules, progress, rank, now, 0)
        if stage < 0:
            continue  # woken again when something becomes ready
        if on_time:
            # A program never waits on purpose, so its tasks may begin earlier than those of a
            # schedule that postpones them.
            _, ready = next_task(step, rules, progress, stage, kind)
            on_time = now <= max(progress.free_at[rank], ready)
            if on_time and now + remaining[rank] > until:
                makespan = np.inf
                break
        end, groups = _begin(step, rules, progress, rank, stage, kind, now, groups)
        progress.free_at[rank] = end
        if on_time:
            remaining[rank] -= end - now
        makespan = max(makespan, end)
        wake_at(progress, end, rank)
    unfinished = np.empty(len(step.uses), np.int64)
    for s in range(len(unfinished)):
        unfinished[s] = step.stages[s + 1, FORWARDS] - step.stages[s, FORWARDS]
        unfinished[s] -= progress.counts[s, NEXT_FORWARD]
        unfinished[s] += step.stages[s + 1, BACKWARDS] - step.stages[s, BACKWARDS]
        unfinished[s] -= progress.counts[s, NEXT_BACKWARD]
    return progress.log[: progress.length[0]], makespan, unfinished


@allocating_part
def _rank_seconds(step, until):
    """Return the (R,) seconds from the first task of each rank to the end of the step, without
    waits; zeros for an infinite ``until``. After its last task, a rank's gradient passes through
    the stages before it."""
    result = np.zeros(len(step.rank_starts) - 1)
    if until == np.inf:
        return result
    after = np.zeros(step.uses.shape)
    least = np.full(len(result), np.inf)
    for stage in np.argsort(-step.stages[:-1, DEPTH]):  # producers before consumers
        rank, last = step.stages[stage, RANK], -1
        for microbatch in range(step.uses.shape[1]):
            uses = step.uses[stage, microbatch]
            if uses & RUN:
                seconds = step.amounts[stage, F_NO_GRAD] * step.loads[stage, microbatch]
                if uses & NEEDS:
                    recomputes = step.stages[stage, RECOMPUTES] > 0
                    operation = F_CHECKPOINTED if recomputes else F
                    seconds = step.amounts[stage, operation] * step.loads[stage, microbatch]
                    seconds += _backward_seconds(step, stage, microbatch)
                    last = microbatch
                else:
                    least[rank] = 0.0
                result[rank] += seconds
            first = step.stages[stage, PRODUCERS] if uses & OWES else step.stages[
                stage + 1, PRODUCERS
            ]
            for edge in range(first, step.stages[stage + 1, PRODUCERS]):
                producer = step.edges[edge, PRODUCER]
                if step.uses[producer, microbatch] & NEEDS:
                    path = step.delays[edge, 1] + after[producer, microbatch]
                    path += _backward_seconds(step, producer, microbatch)
                    after[stage, microbatch] = max(after[stage, microbatch], path)
        if last >= 0:
            least[rank] = min(least[rank], after[stage, last])
    for rank in range(len(result)):
        if least[rank] < np.inf:
            result[rank] += least[rank]
    return result


@part
def _backward_seconds(step, stage, microbatch):
    seconds = step.amounts[stage, B]
    if step.stages[stage, RECOMPUTES] > 0:
        seconds += step.amounts[stage, R]
    return seconds * step.loads[stage, microbatch]


@part
def _choose(step, rules, progress, rank, now, concurrent):
    """Return stage (-1 for none) and kind of the best task that a rank can start concurrently with
    the first ``concurrent`` tasks that have begun."""
    options = 0
    lacks_room = rules.priority.max()  # best priority of tasks that lack only memory
    for index in range(step.rank_starts[rank], step.rank_starts[rank + 1]):
        stage = step.rank_stages[index]
        for kind in range(4):
            if kind == WEIGHT and not rules.split or (
                kind == RECOMPUTE and not step.stages[stage, RECOMPUTES]
            ):
                continue
            microbatch, ready = next_task(step, rules, progress, stage, kind)
            if microbatch < 0 or not in_phase(rules, progress, rank, stage, kind, microbatch):
                continue
            if concurrent > 0 and not _fits_group(
                step, rules, progress, stage, kind, microbatch, concurrent
            ):
                continue
            if has_room(step, rules, progress, stage, kind, microbatch):
                progress.options[options, 0] = stage
                progress.options[options, 1] = kind
                progress.option_ready[options] = ready
                progress.options[options, 2] = microbatch
                options += 1
            elif ready <= now:
                lacks_room = min(lacks_room, rules.priority[kind])
    best, chosen = (0.0, 0, 0), -1
    for option in range(options):
        if progress.option_ready[option] > now:
            continue
        kind, stage = progress.options[option, 1], progress.options[option, 0]
        depth = step.stages[stage, DEPTH] if kind == FORWARD else -step.stages[stage, DEPTH]
        microbatch = progress.options[option, 2]
        key = (_key(rules, stage, kind, microbatch, lacks_room), microbatch, depth)
        if chosen < 0 or key < best:
            best, chosen = key, option
    if chosen < 0:
        return -1, -1
    stage, kind = progress.options[chosen, 0], progress.options[chosen, 1]
    postponed = kind == RECOMPUTE or kind == WEIGHT or best[0] >= rules.fills_bubbles
    if rules.patience > 0 and postponed:
        operation = OPERATION_OF[kind]
        seconds = step.amounts[stage, operation] * step.loads[stage, best[1]]
        horizon = now + rules.patience * seconds
        for option in range(options):
            ready = progress.option_ready[option]
            priority = _key(
                rules, progress.options[option, 0], progress.options[option, 1],
                progress.options[option, 2], lacks_room,
            )
            urgent = kind == RECOMPUTE or kind == WEIGHT or priority < rules.fills_bubbles
            if now < ready < horizon and priority < best[0] and urgent:
                return -1, -1
    return stage, kind


@part
def _key(rules, stage, kind, microbatch, lacks_room):
    if rules.keys.size > 0:
        return rules.keys[kind, stage, microbatch]
    priority = rules.priority[kind]
    return float(min(priority, lacks_room) if kind == WEIGHT else priority)


@part
def _on_its_quota(step, rules, progress, stage, kind, microbatch):
    """Return where a task must run. A backward runs where its activations were computed."""
    if step.amounts[stage, QUOTA_SHARE] == 0:
        return WHOLE
    made_first = step.stages[stage, RECOMPUTES] > 0 and not rules.early
    if kind == FORWARD or kind == RECOMPUTE or (kind == BACKWARD and made_first):
        return ANY
    return QUOTA if progress.on_quota[stage, microbatch] else WHOLE


@part
def _fits_group(step, rules, progress, stage, kind, microbatch, concurrent):
    if kind != progress.begun[0, 1]:
        return False
    for index in range(concurrent):
        if step.stages[progress.begun[index, 0], MODULE] == step.stages[stage, MODULE]:
            return False
    return _on_its_quota(step, rules, progress, stage, kind, microbatch) != WHOLE


@part
def _begin(step, rules, progress, rank, stage, kind, now, groups):
    """Begin a task and concurrent others; return the end of the last and the number of groups."""
    first = progress.length[0]
    _begin_task(step, rules, progress, 0, stage, kind, now)
    if step.amounts[stage, QUOTA_SHARE] == 0:  # the usual case
        end = now + progress.begun_seconds[0]
        _end(step, progress, 0, end)
        return end, groups
    count = 1
    device_share = _on_its_quota(step, rules, progress, stage, kind, progress.begun[0, 2])
    if device_share != WHOLE:
        while True:
            companion, companion_kind = _choose(step, rules, progress, rank, now, count)
            if companion < 0:
                break
            _begin_task(step, rules, progress, count, companion, companion_kind, now)
            count += 1
    on_quota = device_share == QUOTA or (device_share == ANY and count > 1)
    end = now + progress.begun_seconds[0]
    if on_quota:
        end = 0.0
        for index in range(count):
            quota = step.amounts[progress.begun[index, 0], QUOTA_SHARE]
            end = max(end, now + progress.begun_seconds[index] / (quota if quota > 0 else 1.0))
        for entry in range(first, progress.length[0]):
            progress.log[entry, 3] = groups
        groups += 1
    for index in range(count):
        began = progress.begun[index]
        if began[1] == FORWARD or began[1] == RECOMPUTE:
            progress.on_quota[began[0], began[2]] = on_quota
        _end(step, progress, index, end)
    return end, groups


@part
def _begin_task(step, rules, progress, place, stage, kind, now):
    first = step.stages[stage, BACKWARDS]
    if kind == FORWARD:
        index = step.stages[stage, FORWARDS] + progress.counts[stage, NEXT_FORWARD]
        microbatch = step.microbatches[index]
        progress.counts[stage, NEXT_FORWARD] += 1
        operation = F_NO_GRAD
        if step.uses[stage, microbatch] & NEEDS:
            operation = F_CHECKPOINTED if step.stages[stage, RECOMPUTES] > 0 else F
            progress.counts[stage, STARTED] += 1
            kept = step.amounts[stage, KEPT] * step.loads[stage, microbatch]
            _hold(step, progress, stage, microbatch, kept)
        for edge in range(step.stages[stage, PRODUCERS], step.stages[stage + 1, PRODUCERS]):
            producer = step.edges[edge, PRODUCER]
            if step.uses[producer, microbatch] & RUN:
                progress.consumed[producer, step.stages[stage, MODULE]] += 1
                wake_at(progress, now, step.stages[producer, RANK])
    elif kind == RECOMPUTE:
        microbatch = step.microbatches[first + progress.counts[stage, NEXT_RECOMPUTE]]
        progress.counts[stage, NEXT_RECOMPUTE] += 1
        remade = step.amounts[stage, ACTIVATION] * step.loads[stage, microbatch]
        _hold(step, progress, stage, microbatch, remade)
        operation = R
    elif kind == BACKWARD:
        microbatch = step.microbatches[first + progress.counts[stage, NEXT_BACKWARD]]
        progress.counts[stage, NEXT_BACKWARD] += 1
        operation = B
        if rules.split and step.stages[stage, TRAINS] > 0 and step.uses[stage, microbatch] & OWES:
            operation = B_INPUT
            progress.weights[first + progress.counts[stage, LAST_WEIGHT]] = microbatch
            progress.counts[stage, LAST_WEIGHT] += 1
        else:
            _hold(step, progress, stage, microbatch, -progress.held[stage, microbatch])
    else:
        microbatch = progress.weights[first + progress.counts[stage, FIRST_WEIGHT]]
        progress.counts[stage, FIRST_WEIGHT] += 1
        _hold(step, progress, stage, microbatch, -progress.held[stage, microbatch])
        operation = B_WEIGHT
    seconds = 0.0
    if kind == BACKWARD and step.stages[stage, RECOMPUTES] > 0 and not rules.early:
        _note(progress, stage, microbatch, R)
        progress.counts[stage, NEXT_RECOMPUTE] += 1
        seconds = step.amounts[stage, R]
    _note(progress, stage, microbatch, operation)
    progress.begun[place, 0] = stage
    progress.begun[place, 1] = kind
    progress.begun[place, 2] = microbatch
    load = step.loads[stage, microbatch]
    progress.begun_seconds[place] = seconds * load + step.amounts[stage, operation] * load
    if rules.phases.size > 0 and (kind == FORWARD or kind == BACKWARD):
        phase = rules.phases[0 if kind == FORWARD else 1, stage, microbatch]
        progress.waiting[step.stages[stage, RANK], phase] -= 1


@part
def _hold(step, progress, stage, microbatch, more):
    progress.held[stage, microbatch] += more
    progress.rank_held[step.stages[stage, RANK]] += more


@part
def _note(progress, stage, microbatch, operation):
    entry = progress.log[progress.length[0]]
    entry[0], entry[1], entry[2], entry[3] = stage, microbatch, operation, -1
    progress.length[0] += 1


@part
def _end(step, progress, place, end):
    """Record the end of a task, and wake the ranks that may wait for it."""
    began = progress.begun[place]
    stage, kind, microbatch = began[0], began[1], began[2]
    if kind == FORWARD:
        progress.ends[FORWARD_END, stage, microbatch] = end
        for row in range(step.stages[stage, CONSUMERS], step.stages[stage + 1, CONSUMERS]):
            delay = step.delays[step.edges[row, CONSUMER_EDGE], 0]
            wake_at(progress, end + delay, step.stages[step.edges[row, CONSUMER], RANK])
    elif kind == RECOMPUTE:
        progress.ends[RECOMPUTED_END, stage, microbatch] = end
    elif kind == BACKWARD:
        progress.ends[BACKWARD_END, stage, microbatch] = end
        for edge in range(step.stages[stage, PRODUCERS], step.stages[stage + 1, PRODUCERS]):
            delay = step.delays[edge, 1]
            wake_at(progress, end + delay, step.stages[step.edges[edge, PRODUCER], RANK])
