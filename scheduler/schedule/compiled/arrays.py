"""A step of a plan as arrays, and the rules of a schedule as numbers, for compiled code.

``S`` stages, ``M`` microbatches, ``R`` ranks, ``E`` data edges. Lists per stage or rank are
concatenated in one array, with the offset of each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Operations, as in :data:`raymm.scheduler.schedule.step_parts.OPS`.
F, F_NO_GRAD, F_CHECKPOINTED, R, B, B_INPUT, B_WEIGHT = range(7)
# Columns of ``stages``: properties, and offsets of the stage's lists.
RANK, MODULE, DEPTH, HELD, RECOMPUTES, TRAINS = range(6)
FORWARDS, BACKWARDS, PRODUCERS, CONSUMERS = range(6, 10)
# Columns of ``amounts``, after seconds by operation.
KEPT, ACTIVATION, QUOTA_SHARE = range(7, 10)
# Bits of ``uses``: what a microbatch does in a stage (ActiveStages of step_graph.py).
RUN, NEEDS, OWES = 1, 2, 4
# Columns of edges: the producer, by consumer; the consumer and its edge number, by producer.
PRODUCER, CONSUMER, CONSUMER_EDGE = range(3)


class StepArrays(NamedTuple):
    """A step of a plan, or an independent part of it. All arrays are C-contiguous: machine code is
    compiled per memory layout, which takes many seconds.

    Attributes:
        stages: (S + 1, 10) int64; the last row only ends the lists.
        amounts: (S, 10) float64: seconds by operation, bytes after a forward, further bytes after a
            recomputation, quota (0 for none).
        uses: (S, M) uint8, bits per stage and microbatch.
        microbatches: microbatches of every stage's forwards, then of every stage's backwards.
        edges: (E, 3) int64. The first column is ordered by consumer, the others by producer and
            then by rank.
        consumers: (E,) int64, consumer of each edge in the order of consumers.
        carried: (E, M) bool, True if an edge carries data to another rank.
        delays: (E, 2) float64, seconds of an output and of a gradient.
        consumer_modules: (S, modules) bool.
        rank_starts, rank_stages: stages of each rank, producers before consumers.
        loads: (S, M) float64, factor of a microbatch's seconds and bytes in ``amounts``.
    """

    stages: np.ndarray
    amounts: np.ndarray
    uses: np.ndarray
    microbatches: np.ndarray
    edges: np.ndarray
    consumers: np.ndarray
    carried: np.ndarray
    delays: np.ndarray
    consumer_modules: np.ndarray
    rank_starts: np.ndarray
    rank_stages: np.ndarray
    loads: np.ndarray


class RuleArrays(NamedTuple):
    """Rules of a schedule (:mod:`raymm.scheduler.schedules.policy`) as numbers. ``limits``
    is (R,) bytes, empty for no limit; ``ahead`` (S,) most microbatches of a stage, 0 for the other
    rules. ``keys`` (4, S, M) and ``phases`` (2, S, M) are those of a
    :class:`~raymm.scheduler.schedules.policy.TaskOrder`, empty without one; ``fills_bubbles`` is
    the least key of tasks that only fill bubbles."""

    priority: np.ndarray
    patience: float
    hops: int
    beyond_depth: bool
    flush: bool
    split: bool
    early: bool
    limits: np.ndarray
    ahead: np.ndarray
    keys: np.ndarray
    phases: np.ndarray
    fills_bubbles: float
