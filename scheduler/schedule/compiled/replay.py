"""A schedule's program, simulated, and what its ranks hold, without making the program: what
:func:`raymm.scheduler.schedule.simulate.simulate` and
:func:`raymm.scheduler.schedule.memory.peak_bytes` say of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from raymm.scheduler.schedule.compiled.arrays import (
    B_INPUT,
    CONSUMER,
    CONSUMER_EDGE,
    CONSUMERS,
    F_CHECKPOINTED,
    F_NO_GRAD,
    MODULE,
    NEEDS,
    PRODUCER,
    PRODUCERS,
    QUOTA_SHARE,
    RANK,
    RECOMPUTES,
    RUN,
    B,
    F,
    R,
)
from raymm.scheduler.schedule.compiled.machine_code import entry, part


class TransferArrays(NamedTuple):
    """What a message takes, (E,) float64 each: seconds that an output occupies its link, then until
    it is there; the same of a gradient."""

    output: np.ndarray
    output_latency: np.ndarray
    gradient: np.ndarray
    gradient_latency: np.ndarray


class _Messages(NamedTuple):
    """(E, M) when messages arrive, inf while they are not sent; (E,) when links are free."""

    outputs: np.ndarray
    gradients: np.ndarray
    output_link: np.ndarray
    gradient_link: np.ndarray


@entry
def replay(step, log, starts, early, seconds, transfers):
    """When the last rank is done; -1 if ranks wait for each other for ever.

    Args:
        step: :class:`.arrays.StepArrays`.
        log: (tasks, 4) stage, microbatch, operation and group, rank by rank.
        starts: (R + 1,) offsets of the ranks' tasks.
        early: whether a recomputation runs without waiting for its gradient.
        seconds: (S, 7) by operation.
        transfers: :class:`TransferArrays`.
    """
    ranks, edges, microbatches = len(starts) - 1, len(step.edges), step.uses.shape[1]
    shape = (edges, microbatches)
    messages = _Messages(
        np.full(shape, np.inf), np.full(shape, np.inf), np.zeros(edges), np.zeros(edges)
    )
    clock, position = np.zeros(ranks), starts[:-1].copy()
    runnable, count = np.arange(ranks), ranks
    queued = np.ones(ranks, np.bool_)
    ends = np.zeros(step.consumer_modules.shape[1])
    while count > 0:
        count -= 1
        rank = runnable[count]
        queued[rank] = False
        while position[rank] < starts[rank + 1]:
            at = position[rank]
            after = at + 1
            while log[at, 3] >= 0 and after < starts[rank + 1] and log[after, 3] == log[at, 3]:
                after += 1
            now = clock[rank]
            for task in range(at, after):
                now = max(now, _inputs_there(step, messages, log[task], early))
            if now == np.inf:
                break
            if log[at, 3] < 0:
                now += seconds[log[at, 0], log[at, 2]]
            else:
                now = _group_end(step, log[at:after], seconds, now, ends)
            for task in range(at, after):
                count = _send(step, messages, log[task], now, transfers, runnable, queued, count)
            clock[rank], position[rank] = now, after
    for rank in range(ranks):
        if position[rank] < starts[rank + 1]:
            return -1.0
    return clock.max()


@part
def _inputs_there(step, messages, task, early):
    """When what a task receives is there."""
    stage, microbatch, operation = task[0], task[1], task[2]
    there = 0.0
    if operation == F or operation == F_NO_GRAD or operation == F_CHECKPOINTED:
        for edge in range(step.stages[stage, PRODUCERS], step.stages[stage + 1, PRODUCERS]):
            producer = step.edges[edge, PRODUCER]
            rank = step.stages[producer, RANK]
            if step.uses[producer, microbatch] & RUN and rank != step.stages[stage, RANK]:
                there = max(there, messages.outputs[edge, microbatch])
        return there
    # Where a recomputation and its backward are next to each other, the gradient is there first.
    first = R if step.stages[stage, RECOMPUTES] > 0 and not early else B
    if operation == first or operation == B_INPUT and first == B:
        for at in range(step.stages[stage, CONSUMERS], step.stages[stage + 1, CONSUMERS]):
            consumer = step.edges[at, CONSUMER]
            rank = step.stages[consumer, RANK]
            if step.uses[consumer, microbatch] & NEEDS and rank != step.stages[stage, RANK]:
                there = max(there, messages.gradients[step.edges[at, CONSUMER_EDGE], microbatch])
    return there


@part
def _group_end(step, tasks, seconds, start, ends):
    """One module's tasks one after another, modules concurrently."""
    end = start
    for at in range(len(tasks)):
        ends[step.stages[tasks[at, 0], MODULE]] = start
    for at in range(len(tasks)):
        stage = tasks[at, 0]
        module, quota = step.stages[stage, MODULE], step.amounts[stage, QUOTA_SHARE]
        ends[module] += seconds[stage, tasks[at, 2]] / quota
        end = max(end, ends[module])
    return end


@part
def _send(step, messages, task, now, transfers, runnable, queued, count):
    """Send what a task made; its receivers are runnable then."""
    stage, microbatch, operation = task[0], task[1], task[2]
    if operation == F or operation == F_NO_GRAD or operation == F_CHECKPOINTED:
        for at in range(step.stages[stage, CONSUMERS], step.stages[stage + 1, CONSUMERS]):
            consumer, edge = step.edges[at, CONSUMER], step.edges[at, CONSUMER_EDGE]
            rank = step.stages[consumer, RANK]
            if step.uses[consumer, microbatch] & RUN and rank != step.stages[stage, RANK]:
                sent = max(now, messages.output_link[edge]) + transfers.output[edge]
                messages.output_link[edge] = sent
                messages.outputs[edge, microbatch] = sent + transfers.output_latency[edge]
                count = _wake(rank, runnable, queued, count)
    elif operation == B or operation == B_INPUT:
        for edge in range(step.stages[stage, PRODUCERS], step.stages[stage + 1, PRODUCERS]):
            producer = step.edges[edge, PRODUCER]
            rank = step.stages[producer, RANK]
            if step.uses[producer, microbatch] & NEEDS and rank != step.stages[stage, RANK]:
                sent = max(now, messages.gradient_link[edge]) + transfers.gradient[edge]
                messages.gradient_link[edge] = sent
                messages.gradients[edge, microbatch] = sent + transfers.gradient_latency[edge]
                count = _wake(rank, runnable, queued, count)
    return count


@part
def _wake(rank, runnable, queued, count):
    if not queued[rank]:
        queued[rank] = True
        runnable[count] = rank
        count += 1
    return count


@entry
def activation_peaks(step, log, starts, inputs, activations, remade):
    """(R,) int64, the most bytes of activations that a rank holds at any time.

    Args:
        step, log, starts: as of :func:`replay`.
        inputs, activations, remade: (S,) int64 bytes of stages, as in
            :mod:`raymm.scheduler.schedule.stage_costs`.
    """
    ranks = len(starts) - 1
    peaks = np.zeros(ranks, np.int64)
    held = np.full(step.uses.shape, -1, np.int64)
    for rank in range(ranks):
        total, again, freed, last = 0, 0, 0, -1
        for at in range(starts[rank], starts[rank + 1]):
            stage, microbatch, operation, group = log[at, 0], log[at, 1], log[at, 2], log[at, 3]
            if group < 0 or group != last:  # what went before has ended
                total, again, freed, last = total - freed, 0, 0, group
            if operation == F or operation == R or operation == F_CHECKPOINTED:
                more = inputs[stage] if operation == F_CHECKPOINTED else activations[stage]
                held[stage, microbatch] = max(held[stage, microbatch], 0) + more
                total += more
                peaks[rank] = max(peaks[rank], total)
            elif held[stage, microbatch] >= 0:
                again += remade[stage]
                peaks[rank] = max(peaks[rank], total + again)
                if operation != B_INPUT:
                    freed += held[stage, microbatch]
                    held[stage, microbatch] = -1
    return peaks
