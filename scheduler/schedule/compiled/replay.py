"""Simulation of a schedule's program that does not create the program.

Times equal those of :func:`raymm.scheduler.schedule.simulate.simulate`, message by message, and
bytes those of :func:`raymm.scheduler.schedule.memory.peak_bytes`.
"""

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
    B,
    F,
    R,
)
from raymm.scheduler.schedule.compiled.machine_code import entry, part

OUTPUT, GRADIENT = range(2)  # directions of messages


class TransferArrays(NamedTuple):
    """Time of messages, by direction (:data:`OUTPUT`, :data:`GRADIENT`) and edge: (2, E) float64
    seconds that a message occupies its link, and latency until it arrives."""

    seconds: np.ndarray
    latency: np.ndarray


class _Messages(NamedTuple):
    """State of messages, by direction, edge and (M) microbatch.

    Attributes:
        arrivals: (2, E, M) arrival time; inf before the send.
        received: (2, E, M) True once the receiver has the message.
        times: (2, E, M) times at which receives made room for sends, in order: when messages were
            received, or when their RECV began if it posts another receive.
        counts: (2, 2, E) number of messages sent, and received.
        links: (2, E) time when a link becomes free.
        handed: (E, M) True once a consumer has computed its gradient.
        next: (2, E) next microbatch whose output to receive, and whose gradient to send: if several
            stages of a rank read an output, a later one may be read, or complete, first.
        delayed: (1,) True if the bound of messages in flight made a sender wait.
    """

    arrivals: np.ndarray
    received: np.ndarray
    times: np.ndarray
    counts: np.ndarray
    links: np.ndarray
    handed: np.ndarray
    next: np.ndarray
    delayed: np.ndarray


@entry
def replay(step, log, starts, early, seconds, transfers, bound, posted):
    """Return the end of the last rank in seconds (-1 if ranks deadlock), and whether the bound made
    a sender wait.

    Args:
        log: (tasks, 4) stage, microbatch, operation and group, rank by rank.
        starts: (R + 1,) offsets of the ranks' tasks.
        early: True if a recomputation does not wait for its gradient.
        seconds: (S, 7) by operation.
        bound: most messages of an edge in flight.
        posted: receives posted ahead, as in :func:`~raymm.scheduler.schedule.simulate.simulate`.
    """
    ranks, edges, microbatches = len(starts) - 1, len(step.edges), step.uses.shape[1]
    shape = (2, edges, microbatches)
    messages = _Messages(
        np.full(shape, np.inf), np.zeros(shape, np.bool_), np.zeros(shape),
        np.zeros((2, 2, edges), np.int64), np.zeros((2, edges)),
        np.zeros((edges, microbatches), np.bool_), np.zeros((2, edges), np.int64),
        np.zeros(1, np.bool_),
    )
    clock, position = np.zeros(ranks), starts[:-1].copy()
    computed = np.zeros(ranks, np.bool_)  # True once its task is computed, until all is sent
    runnable = np.arange(ranks + 1)
    runnable[ranks] = ranks  # the last entry is their number
    queued = np.ones(ranks, np.bool_)
    ends = np.zeros(step.consumer_modules.shape[1])
    while runnable[ranks] > 0:
        runnable[ranks] -= 1
        rank = runnable[runnable[ranks]]
        queued[rank] = False
        while position[rank] < starts[rank + 1]:
            begin = position[rank]
            end = begin + 1
            while log[begin, 3] >= 0 and end < starts[rank + 1] and log[end, 3] == log[begin, 3]:
                end += 1
            if not computed[rank]:
                received = True
                for task in range(begin, end):
                    if received:
                        received = _receive(
                            step, messages, log[task], early, clock, posted, runnable, queued
                        )
                if not received:
                    break
                if log[begin, 3] < 0:
                    load = step.loads[log[begin, 0], log[begin, 1]]
                    clock[rank] += seconds[log[begin, 0], log[begin, 2]] * load
                else:
                    clock[rank] = _group_end(step, log[begin:end], seconds, clock[rank], ends)
                computed[rank] = True
            sent = True
            for task in range(begin, end):
                if sent:
                    sent = _send(
                        step, messages, log[task], clock, transfers, bound, posted, runnable,
                        queued,
                    )
            if not sent:
                break
            computed[rank], position[rank] = False, end
    for rank in range(ranks):
        if position[rank] < starts[rank + 1]:
            return -1.0, True
    return clock.max(), messages.delayed[0]


@part
def _receive(step, messages, task, early, clock, posted, runnable, queued):
    """Receive all inputs of a task in the program's order; return False if one was not sent. Only
    new messages wake their sender, or two ranks that wait for a third would wake each other
    forever."""
    stage, microbatch, operation = task[0], task[1], task[2]
    rank = step.stages[stage, RANK]
    if operation == F or operation == F_NO_GRAD or operation == F_CHECKPOINTED:
        for edge in range(step.stages[stage, PRODUCERS], step.stages[stage + 1, PRODUCERS]):
            if not step.carried[edge, microbatch]:
                continue
            message = _message(step, edge, microbatch)
            while messages.next[OUTPUT, message] <= microbatch:
                number = messages.next[OUTPUT, message]
                if step.carried[message, number] and _message(step, message, number) == message:
                    if not _received(messages, OUTPUT, message, number, rank, clock, posted):
                        return False
                    _wake(step.stages[step.edges[edge, PRODUCER], RANK], runnable, queued)
                messages.next[OUTPUT, message] += 1
        return True
    # Without early recomputation, the gradient is received before the recomputation.
    first = R if step.stages[stage, RECOMPUTES] > 0 and not early else B
    if operation == first or operation == B_INPUT and first == B:
        for row in range(step.stages[stage, CONSUMERS], step.stages[stage + 1, CONSUMERS]):
            edge = step.edges[row, CONSUMER_EDGE]
            if step.carried[edge, microbatch] and _message(step, edge, microbatch) == edge:
                if messages.received[GRADIENT, edge, microbatch]:
                    continue
                if not _received(messages, GRADIENT, edge, microbatch, rank, clock, posted):
                    return False
                _wake(step.stages[step.edges[row, CONSUMER], RANK], runnable, queued)
    return True


@part
def _received(messages, direction, edge, microbatch, rank, clock, posted):
    """Receive a message; return False if it was not sent."""
    arrival = messages.arrivals[direction, edge, microbatch]
    if arrival == np.inf:
        return False
    called = clock[rank]
    clock[rank] = max(called, arrival)
    messages.received[direction, edge, microbatch] = True
    freed = called if posted > 1 else clock[rank]
    messages.times[direction, edge, messages.counts[direction, 1, edge]] = freed
    messages.counts[direction, 1, edge] += 1
    return True


@part
def _message(step, edge, microbatch):
    """Return the edge that identifies the message: that of the first consumer on the receiving
    rank."""
    producer, rank = step.edges[edge, PRODUCER], step.stages[step.consumers[edge], RANK]
    for row in range(step.stages[producer, CONSUMERS], step.stages[producer + 1, CONSUMERS]):
        first = step.edges[row, CONSUMER_EDGE]
        if step.stages[step.edges[row, CONSUMER], RANK] == rank and step.carried[first, microbatch]:
            return first
    return edge


@part
def _group_end(step, tasks, seconds, start, ends):
    """Return the end of a group: tasks of one module run in sequence, modules concurrently."""
    end = start
    for index in range(len(tasks)):
        ends[step.stages[tasks[index, 0], MODULE]] = start
    for index in range(len(tasks)):
        stage = tasks[index, 0]
        module, quota = step.stages[stage, MODULE], step.amounts[stage, QUOTA_SHARE]
        load = step.loads[stage, tasks[index, 1]]
        ends[module] += seconds[stage, tasks[index, 2]] * load / quota
        end = max(end, ends[module])
    return end


@part
def _send(step, messages, task, clock, transfers, bound, posted, runnable, queued):
    """Send all results of a task in the program's order; return False if too many are in flight."""
    stage, microbatch, operation = task[0], task[1], task[2]
    rank = step.stages[stage, RANK]
    if operation == F or operation == F_NO_GRAD or operation == F_CHECKPOINTED:
        for row in range(step.stages[stage, CONSUMERS], step.stages[stage + 1, CONSUMERS]):
            edge = step.edges[row, CONSUMER_EDGE]
            if step.carried[edge, microbatch] and _message(step, edge, microbatch) == edge:
                if messages.arrivals[OUTPUT, edge, microbatch] < np.inf:
                    continue
                if not _sent(
                    messages, OUTPUT, edge, microbatch, rank, clock, transfers, bound, posted
                ):
                    return False
                _wake(step.stages[step.edges[row, CONSUMER], RANK], runnable, queued)
    elif operation == B or operation == B_INPUT:
        for edge in range(step.stages[stage, PRODUCERS], step.stages[stage + 1, PRODUCERS]):
            producer = step.edges[edge, PRODUCER]
            if not step.carried[edge, microbatch] or not step.uses[producer, microbatch] & NEEDS:
                continue
            messages.handed[edge, microbatch] = True
            message = _message(step, edge, microbatch)
            while messages.next[GRADIENT, message] < step.uses.shape[1]:
                number = messages.next[GRADIENT, message]
                if (
                    step.carried[message, number] and step.uses[producer, number] & NEEDS
                    and _message(step, message, number) == message
                ):
                    if not _all_handed(step, messages, producer, rank, number):
                        break  # the rank's last stage that reads the output sends the sum
                    if not _sent(
                        messages, GRADIENT, message, number, rank, clock, transfers, bound, posted
                    ):
                        return False
                    _wake(step.stages[producer, RANK], runnable, queued)
                messages.next[GRADIENT, message] += 1
    return True


@part
def _all_handed(step, messages, producer, rank, microbatch):
    for row in range(step.stages[producer, CONSUMERS], step.stages[producer + 1, CONSUMERS]):
        edge = step.edges[row, CONSUMER_EDGE]
        if step.stages[step.edges[row, CONSUMER], RANK] == rank and step.carried[edge, microbatch]:
            if not messages.handed[edge, microbatch]:
                return False
    return True


@part
def _sent(messages, direction, edge, microbatch, rank, clock, transfers, bound, posted):
    """Send a message; return False if the bound is reached and no receive has made room."""
    count = messages.counts[direction, 0, edge]
    freeing = count - bound - posted + 1  # number of the RECV that makes room
    if freeing >= (1 if posted > 1 else 0):
        if messages.counts[direction, 1, edge] <= freeing:
            return False
        freed = messages.times[direction, edge, freeing]
        if freed > clock[rank]:
            messages.delayed[0] = True
            clock[rank] = freed
    messages.counts[direction, 0, edge] += 1
    sent = max(clock[rank], messages.links[direction, edge]) + transfers.seconds[direction, edge]
    messages.links[direction, edge] = sent
    messages.arrivals[direction, edge, microbatch] = sent + transfers.latency[direction, edge]
    return True


@part
def _wake(rank, runnable, queued):
    """Make a rank runnable; the last entry of ``runnable`` is the number of runnable ranks."""
    if not queued[rank]:
        queued[rank] = True
        runnable[runnable[-1]] = rank
        runnable[-1] += 1


@entry
def activation_peaks(step, log, starts, inputs, activations, remade):
    """Return the (R,) int64 peak bytes of activations of each rank, with ``log`` and ``starts`` as
    in :func:`replay`. The sizes of stages are (S,) int64 bytes."""
    ranks = len(starts) - 1
    peaks = np.zeros(ranks, np.int64)
    held = np.full(step.uses.shape, -1, np.int64)
    for rank in range(ranks):
        total, recomputed, freed, last = 0, 0, 0, -1
        for row in range(starts[rank], starts[rank + 1]):
            stage, microbatch, operation, group = log[row, 0], log[row, 1], log[row, 2], log[row, 3]
            if group < 0 or group != last:  # the previous group has ended
                total, recomputed, freed, last = total - freed, 0, 0, group
            if operation == F or operation == R or operation == F_CHECKPOINTED:
                added = inputs[stage] if operation == F_CHECKPOINTED else activations[stage]
                added = int(added * step.loads[stage, microbatch])
                held[stage, microbatch] = max(held[stage, microbatch], 0) + added
                total += added
                peaks[rank] = max(peaks[rank], total)
            elif held[stage, microbatch] >= 0:
                recomputed += int(remade[stage] * step.loads[stage, microbatch])
                peaks[rank] = max(peaks[rank], total + recomputed)
                if operation != B_INPUT:
                    freed += held[stage, microbatch]
                    held[stage, microbatch] = -1
    return peaks
